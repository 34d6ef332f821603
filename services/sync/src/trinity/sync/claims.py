"""The claim of a run by one trainer: a lease that Claim renews, and that Release or time ends."""

import time
import uuid
from dataclasses import replace

import structlog

from trinity.runtime.errors import AlreadyExists, Conflict, InvalidInput, NotFound
from trinity.sync.store import records
from trinity.sync.store.records import Claim
from trinity.sync.store.state import RunState

log = structlog.get_logger(__name__)


class Claims:
    """The claim on one run.

    A claim's age is the time since this process saw its renewal, so that hosts need not agree on the time, and a
    restarted service lets a trainer's claim live on.
    """

    def __init__(self, state: RunState, claim_seconds: float) -> None:
        self._state = state
        self._key = state.names.claim_key
        self.claim_seconds = claim_seconds

    def _is_alive(self, claim: Claim) -> bool:
        return bool(claim.lease_id) and self._state.mirror.age_seconds(self._key) < self.claim_seconds

    async def take(self, trainer_id: str, pid: int, host: str, lease_id: str) -> Claim:
        """Takes the run or renews the claim. Raises AlreadyExists naming the holder; NotFound for an ended lease."""
        if not trainer_id:
            raise InvalidInput("trainer_id", "is empty")
        fresh_lease = uuid.uuid4().hex
        result = Claim()

        def enter(value: bytes) -> bytes:
            nonlocal result
            old = records.decode_or_new(Claim, value)
            if old.lease_id and lease_id == old.lease_id:
                result = replace(old, renewed_at=time.time())
            elif old.lease_id and old.trainer_id == trainer_id and not lease_id:
                result = replace(old, renewed_at=time.time())  # the answer to its first call was lost
            elif self._is_alive(old):
                raise AlreadyExists(
                    f"run: the trainer of process {old.pid} on {old.host} has this run; end it, or wait "
                    f"{self.claim_seconds:g} s after it has died"
                )
            elif lease_id:
                raise NotFound("lease_id: the claim ran out and another trainer had the run since; start again")
            else:
                result = Claim(old.number + 1, trainer_id, fresh_lease, pid, host, time.time())
            return records.encode(result)

        await self._state.mirror.change(self._key, enter)
        if result.lease_id == fresh_lease:
            log.info("sync.claim.taken", number=result.number, pid=pid, host=host)
        await self._fence(result.number)
        return result

    async def _fence(self, number: int) -> None:
        """Refuses everything of older claims from now on, calls in flight included."""
        if self._state.live.claim < number:
            await self._state.change_pointer(lambda live: replace(live, claim=max(live.claim, number)))

    async def release(self, lease_id: str) -> None:
        """Ends a claim; does nothing if it has ended already."""

        def leave(value: bytes) -> bytes | None:
            old = records.decode_or_new(Claim, value)
            return records.encode(replace(old, lease_id="")) if old.lease_id == lease_id else None

        if lease_id:
            await self._state.mirror.change(self._key, leave)
            log.info("sync.claim.released")

    async def check(self, lease_id: str) -> int | None:
        """Returns the number of the trainer's claim; None if it needs none. Raises Conflict if it may not act."""
        claim = records.decode_or_new(Claim, (await self._state.mirror.fresh(self._key)).value)
        if lease_id and lease_id == claim.lease_id:
            return claim.number
        if self._is_alive(claim):
            raise Conflict(
                f"lease_id: the trainer of process {claim.pid} on {claim.host} has this run; only it makes versions"
            )
        if lease_id:
            raise Conflict("lease_id: this claim ran out, and another trainer had the run since; start again")
        return None
