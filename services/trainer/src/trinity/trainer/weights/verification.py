"""Verification results of published versions: verified and LIVE, or rejected.

expect -> (poll, about once a second) -> LIVE, or rejected: the trainer ends or continues, as the YAML says

A version that a rollback withdrew counts as rejected too, even if its weights are correct.
"""

import time
from collections.abc import Callable, Collection, Sequence

import structlog

from trinity.runtime.errors import NotFound, TrinityError
from trinity.weights import client as calls
from trinity.weights.client import BlockingSyncClient, Version
from trinity.weights.pointer import Rollback
from trinity.weights.wire import VersionState

log = structlog.get_logger(__name__)

_SERVED = (VersionState.LIVE, VersionState.RETIRED)


class VersionRejected(TrinityError):
    """Explorers refuse a version: its files are damaged, or its canary differs from the trainer's."""

    for_good = True


class VerificationResults:
    """Follows published versions until they are verified.

    withdrawn: returns the versions that rollbacks withdrew, up to date; called at each rejection.
    """

    def __init__(
        self,
        client: BlockingSyncClient,
        withdrawn: Callable[[], Collection[int]],
        stops: bool,
        allowed: tuple[float, float],
        seconds: float = 1.0,
    ) -> None:
        """seconds: time between two polls."""
        self._client = client
        self._withdrawn = withdrawn
        self._stops = stops
        self._allowed = allowed
        self._seconds = seconds
        self._pending: set[int] = set()
        self._polled_at = 0.0
        self.live_version = -1

    def open(self, known: Sequence[Version]) -> None:
        """Starts from the service's records, newest first. Raises VersionRejected if the newest was rejected."""
        self.live_version = max((v.version for v in known if v.state is VersionState.LIVE), default=-1)
        newer = [v for v in known if v.version > max(self.live_version, *self._withdrawn(), -1)]
        self._pending = {v.version for v in newer if v.state in (VersionState.STAGED, VersionState.VERIFIED)}
        rejected = next((v for v in newer if v.state is VersionState.REJECTED), None)
        if rejected is not None and not self._would_pass_now(rejected):
            self._reject(rejected)

    def expect(self, version: int) -> None:
        """Records that a version was published."""
        self._pending.add(version)
        self._polled_at = 0.0

    def follows(self, rollback: Rollback) -> None:
        """Records that an older version is LIVE again; explorers do not verify later versions."""
        self.live_version = rollback.version
        self._pending.clear()

    @property
    def pending(self) -> bool:
        """True while the newest version is not verified."""
        return bool(self._pending)

    def rejects(self, version: int) -> bool:
        """Returns True if a refused version was rejected. Raises VersionRejected like `poll`."""
        try:
            known = self._client.ask(calls.version(version))
        except NotFound:
            return False
        if known.state is VersionState.REJECTED:
            self._reject(known)
        return known.state is VersionState.REJECTED

    def poll(self) -> bool:
        """Polls for a rejected version; returns True for one. Raises VersionRejected if that ends the trainer."""
        if not self._pending or time.monotonic() - self._polled_at < self._seconds:
            return False
        self._polled_at = time.monotonic()
        found = False
        for version in sorted(self._pending):
            known = self._client.ask(calls.version(version))
            if known.state in _SERVED:
                self.live_version = max(self.live_version, version)
                self._pending = {other for other in self._pending if other > version}
            elif known.state is VersionState.REJECTED:
                self._pending.discard(version)
                if version not in self._withdrawn():
                    found = True
                    self._reject(known)
        return found

    def _would_pass_now(self, known: Version) -> bool:
        """Returns True if the YAML's tolerance, perhaps raised since, now allows the measured difference."""
        measured, (mean, largest) = known.measured, self._allowed
        passes = measured is not None and measured.mean_error <= mean and measured.max_error <= largest
        if passes and known.version > 0:
            log.warning("trainer.version.rejected_before", version=known.version, reason=known.reason)
            return True
        return False

    def _reject(self, known: Version) -> None:
        message = _message(known, self.live_version)
        # Without version 0 explorers have no weights.
        if self._stops or (known.version == 0 and self.live_version < 0):
            raise VersionRejected(message)
        log.warning("trainer.version.rejected", version=known.version, reason=message)


def _message(known: Version, live_version: int) -> str:
    what_to_do = (
        f"Explorers keep version {live_version}. synchronizer.canary_tolerance allows more, and "
        "synchronizer.on_rejected: continue trains on without this version"
    )
    if known.version == 0:
        what_to_do = (
            "The explorers' model differs from the trainer's in weights or arithmetic: compare model.model_path and "
            "dtypes, or set a larger synchronizer.canary_tolerance, or synchronizer.canary: false; then start a new "
            "run under another name"
        )
    return f"version {known.version} was rejected: {known.reason}. {what_to_do}"
