"""Fences: what withdrawn versions sampled enters no batch that is not in the ledger yet.

A fence is an entry of the log, so that its order among the groups is the same for every reader. Each rollback gets one,
whenever the buffer hears of it; until then no ledger entry is written.
"""

import asyncio
from collections.abc import Iterable

import structlog

from trinity.buffer.ledger.writer import LedgerWriter
from trinity.buffer.state.context import RunContext
from trinity.buffer.window.groups import FENCED
from trinity.data.wire import encode_fence
from trinity.runtime.broker import PublishRefused, new_message_id
from trinity.runtime.errors import Unavailable

log = structlog.get_logger(__name__)

_FENCE_SECONDS = 30.0
_RETRY_SECONDS = 1.0


class Fences:
    """The only writer of fences."""

    def __init__(self, context: RunContext, writer: LedgerWriter) -> None:
        self._context = context
        self._writer = writer
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Fence every rollback that asks for it."""
        stream = self._context.names.experiences_stream
        begin = (await self._context.broker.state(stream)).last_sequence
        while True:
            await self._context.changed.wait_for(lambda: self._context.unfenced is not None)
            rollback = self._context.unfenced
            assert rollback is not None
            versions = set(range(rollback.version + 1, rollback.newest_version + 1))
            if not self._are_fenced(versions):
                # An earlier process may have written the fence and died: what it wrote is read first.
                await self._context.changed.wait_for(lambda: self._writer.window.log_sequence >= begin)
                await self._until_fenced(versions)
            self._context.fenced_through = rollback.number
            dropped = self._writer.window.dropped[FENCED]
            log.warning("buffer.rollback.fenced", number=rollback.number, version=rollback.version, dropped=dropped)
            await self._context.changed.notify()

    async def fence(self, versions: Iterable[int]) -> int:
        """Fence the named versions. Returns the groups that all fences have dropped so far."""
        wanted = set(versions)
        try:
            async with asyncio.timeout(_FENCE_SECONDS):
                await self._fence(wanted, new_message_id())
        except TimeoutError:
            raise Unavailable(f"versions: the fence did not come through the log in {_FENCE_SECONDS:g} s") from None
        return self._writer.window.dropped[FENCED]

    async def _until_fenced(self, versions: set[int]) -> None:
        """However long the log has no room, or the broker is away."""
        message_id = new_message_id()
        while True:
            try:
                return await self._fence(versions, message_id)
            except (PublishRefused, Unavailable) as error:
                log.warning("buffer.rollback.retried", reason=str(error))
                await asyncio.sleep(_RETRY_SECONDS)

    async def _fence(self, versions: set[int], message_id: str) -> None:
        async with self._writing:
            if self._are_fenced(versions):
                return
            entry = encode_fence(versions)
            stored = await self._context.broker.publish(self._context.names.control, entry, message_id=message_id)
            window = self._writer.window
            await self._context.changed.wait_for(lambda: window.log_sequence >= stored.sequence)

    def _are_fenced(self, versions: set[int]) -> bool:
        return versions <= self._writer.window.fenced
