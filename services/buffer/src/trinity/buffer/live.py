"""What the buffer hears of the run's versions: which one is LIVE, which were withdrawn. Only sync writes it."""

import contextlib

import structlog

from trinity.buffer.shared import RunContext
from trinity.runtime.broker import Bucket
from trinity.runtime.errors import DataLoss
from trinity.weights import VersionState
from trinity.weights.pointer import Live, decode_live, verdict_of

log = structlog.get_logger(__name__)


class LiveVersions:
    """Keeps the pointer in the context, and answers what groups may say of versions."""

    def __init__(self, context: RunContext, versions: Bucket) -> None:
        self._context = context
        self._versions = versions
        self._rejected: set[int] = set()

    async def look(self) -> Live:
        """The pointer as KV has it now."""
        entry = await self._versions.get(self._context.names.live_key)
        await self._take(entry.value)
        return self._context.live

    async def follow(self) -> None:
        async for entry in self._versions.watch(self._context.names.live_key):
            await self._take(entry.value)

    async def _take(self, value: bytes) -> None:
        try:
            live = decode_live(value)
        except DataLoss as error:  # sync writes what it was once more
            log.warning("buffer.live.refused", reason=str(error), version=self._context.live.version)
            return
        if live == self._context.live:
            return
        if live.rollback is not None and live.rollback != self._context.live.rollback:
            log.warning("buffer.rollback.heard", number=live.rollback.number, version=live.rollback.version)
        self._context.live = live
        await self._context.changed.notify()

    async def was_live(self, version: int) -> bool:
        """Whether a version may have sampled tokens: it is not newer than all that ever were LIVE."""
        return version <= self._context.newest_live_step or version <= (await self._looked()).newest_live_step

    async def _looked(self) -> RunContext:
        await self.look()
        return self._context

    async def meets(self, version: int, gate_step: int) -> bool:
        """Whether a task with this gate may be started by a version.

        An older one may if the gate's own version was rejected or withdrawn.
        """
        if version >= gate_step or self._passed_over(gate_step):
            return True
        await self.look()
        return self._passed_over(gate_step) or await self._was_rejected(gate_step)

    def _passed_over(self, gate_step: int) -> bool:
        live = self._context.live
        return live.is_withdrawn(gate_step) or live.step < gate_step <= live.gate_step

    async def _was_rejected(self, version: int) -> bool:
        """Whether the version of a gate was rejected, long ago perhaps: sync's record says so for ever."""
        if version not in self._rejected:
            entry = await self._versions.get(self._context.names.version_key(version))
            with contextlib.suppress(DataLoss):
                if verdict_of(entry.value) is VersionState.REJECTED:
                    self._rejected.add(version)
        return version in self._rejected
