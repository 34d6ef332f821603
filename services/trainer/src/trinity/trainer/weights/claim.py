"""Holds the run's claim at the sync service, which only one trainer has, and renews it while the process lives.

    start -> (the predecessor's claim ends) -> held -> renewed every third of the lease -> released
                                                    -> lost: another trainer has the run; this one must end

Each renewal returns the newest rollback.
"""

import contextlib
import threading
import time
import uuid

import structlog

from trinity.runtime import waits
from trinity.runtime.errors import AlreadyExists, NotFound, TrinityError, Unavailable
from trinity.weights import client as calls
from trinity.weights.client import BlockingSyncClient, Claimed

log = structlog.get_logger(__name__)

# A killed trainer's claim expires after a lease, so its successor waits for two of the service's default leases.
_PATIENCE_SECONDS = 20.0
_RETRY_SECONDS = 0.5


class Claim:
    """start -> wait -> (check, held, renew) -> close. A thread renews it."""

    def __init__(self, client: BlockingSyncClient, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        self._client = client
        self._patience_seconds = patience_seconds
        self._trainer_id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._failure: Exception | None = None
        self.held = Claimed("", 0.0)  # as of the last renewal
        self._absence = waits.Absence("the sync service")
        self._silence = "it has not answered yet"  # why the claim is not held

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="claim").start()

    def wait(self) -> None:
        """Blocks until this trainer holds the claim.

        Raises AlreadyExists naming a holder whose claim does not end, Unavailable if the sync service stays away.
        """
        with waits.waiting("the sync service", lambda: self._silence, limit_seconds=waits.START_SECONDS):
            decided = self._decided.wait(waits.START_SECONDS)
        self.check()
        if not decided:
            raise Unavailable(f"this trainer did not get the run within {waits.START_SECONDS:g} s: {self._silence}")

    def check(self) -> None:
        """Raises the error that ended the claim."""
        if self._failure is not None:
            raise self._failure

    def renew(self) -> Claimed:
        """Renews at once and returns the claim, with the newest rollback."""
        with contextlib.suppress(Unavailable):
            self._attempt()
        self.check()
        return self.held

    def close(self) -> None:
        """Releases the claim."""
        self._closed.set()
        with self._lock, contextlib.suppress(TrinityError):
            if self.held.lease_id and self._failure is None:
                self._client.ask_once(calls.release(self.held.lease_id))

    def _run(self) -> None:
        while not self._closed.is_set() and self._failure is None:
            wait_seconds = _RETRY_SECONDS
            try:
                self._attempt()
                self._absence.found()
                wait_seconds = self.held.lease_seconds / 3
            except Unavailable as error:
                log.info("trainer.claim.retry", reason=str(error))
                self._silence = str(error)
                if self._decided.is_set():  # `wait` speaks for the time before
                    self._note_absence(str(error))
            self._closed.wait(wait_seconds)

    def _note_absence(self, why: str) -> None:
        try:
            self._absence.lost(why)
        except Unavailable as error:
            self._failure = error
            self._client.give_up()

    def _attempt(self) -> None:
        with self._lock:
            if self._closed.is_set() or self._failure is not None:
                return
            try:
                self._renew() if self.held.lease_id else self._begin()
            except Unavailable:
                raise
            except Exception as error:  # this thread ends, so nothing renews the claim
                self._failure = error
                log.error("trainer.claim.lost", reason=str(error) or repr(error))
            self._decided.set()

    def _begin(self) -> None:
        """Claims the run; waits for the claim of a killed predecessor to expire."""
        deadline: float | None = None
        while True:
            try:
                self._claim("")
                return
            except AlreadyExists as error:
                if deadline is None:
                    deadline = time.monotonic() + self._patience_seconds
                    log.info("trainer.claim.waits", seconds=self._patience_seconds, reason=str(error))
                    self._silence = str(error)
                if time.monotonic() > deadline or self._closed.wait(_RETRY_SECONDS):
                    raise

    def _renew(self) -> None:
        """Renews the lease, also after it has expired. Raises AlreadyExists if another trainer has claimed the run."""
        try:
            self._claim(self.held.lease_id)
        except (AlreadyExists, NotFound) as error:
            raise AlreadyExists(f"this trainer has lost the run: {error}") from None

    def _claim(self, lease_id: str) -> None:
        self.held = self._client.ask_once(calls.claim(self._trainer_id, lease_id))
