"""What the log keeps: everything, until it takes more than its share; then what no kept checkpoint can ask for goes.

The log may never be purged above what the newest kept checkpoint needs, nor above what the archives hold.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import structlog

from trinity.buffer.keeper import Keeper
from trinity.buffer.ledger import Ledger
from trinity.buffer.mirror import Mirror
from trinity.buffer.settings import BufferSettings
from trinity.buffer.shared import RunContext
from trinity.runtime.errors import InvalidInput, NotFound
from trinity.runtime.metrics import Gauge
from trinity.runtime.wire import parse_outcome

log = structlog.get_logger(__name__)

BYTES = Gauge("trinity_buffer_log_bytes", "Bytes of the experience log on the broker")

_LOOK_SECONDS = 1.0
# Above these parts of its limit, the log is cut down, and a checkpoint is asked for.
_CUT, _FULL = 0.5, 0.9


class Retention:
    """Purges the log, the blobs beside it and the queue of tasks."""

    def __init__(
        self, context: RunContext, ledger: Ledger, keeper: Keeper, mirrors: Sequence[Mirror], settings: BufferSettings
    ) -> None:
        self._context = context
        self._ledger = ledger
        self._keeper = keeper
        self.mirrors = mirrors
        self.limit_bytes = int(settings.log_gib * 2**30)
        self._keep_bytes = min(int(settings.log_keep_gib * 2**30), int(_CUT * self.limit_bytes))
        self._oldest_kept_step = 0
        self.log_bytes = 0

    @property
    def behind(self) -> int:
        """Log entries that an archive does not hold yet."""
        return max((self._keeper.window.log_sequence - mirror.position for mirror in self.mirrors), default=0)

    async def open(self, oldest_kept_step: int) -> None:
        """Where earlier buffers stood."""
        self._oldest_kept_step = oldest_kept_step
        await asyncio.gather(*(mirror.open() for mirror in self.mirrors))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            for mirror in self.mirrors:
                group.create_task(mirror.run())

    async def released(self, oldest_kept_step: int) -> int:
        """No checkpoint older than this step is kept. Returns the oldest step that can be gone back to."""
        self._oldest_kept_step = max(self._oldest_kept_step, oldest_kept_step)
        await self._look()
        return self._oldest_kept_step

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self) -> None:
        """Cut the log if it is too long, and say whether it is full all the same."""
        names, broker = self._context.names, self._context.broker
        state = await broker.state(names.experiences_stream)
        blobs = await broker.state(names.blobs_stream)
        self.log_bytes = state.bytes + blobs.bytes
        BYTES.set(self.log_bytes)
        if self.log_bytes > self._keep_bytes and await self._cut(state.first_sequence):
            state = await broker.state(names.experiences_stream)
            blobs = await broker.state(names.blobs_stream)
        full = max(state.bytes, blobs.bytes) > _FULL * self.limit_bytes
        if full != self._context.log_is_full:
            self._context.log_is_full = full
            await self._context.bell.ring()
            if full:
                log.warning("buffer.log.full", bytes=state.bytes, blob_bytes=blobs.bytes, limit_bytes=self.limit_bytes)

    async def _cut(self, first_sequence: int) -> bool:
        """Remove what is of no use any more; whether there was something."""
        if self._oldest_kept_step < 1:
            return False
        names, broker = self._context.names, self._context.broker
        entry = await self._ledger.get(self._oldest_kept_step)
        archived = [mirror.position + 1 for mirror in self.mirrors]
        floor = min([entry.floor_sequence, *archived])
        if floor <= first_sequence:
            return False
        await self._cut_blobs(first_sequence, floor)
        await broker.purge_below(names.experiences_stream, floor)
        tasks = min([self._keeper.window.ended_through, self._context.fed - 1, *self._keeper.window.revived])
        await broker.purge_below(names.tasks_stream, max(1, tasks))
        log.info("buffer.log.cut", below=floor, kept_step=self._oldest_kept_step)
        return True

    async def _cut_blobs(self, first: int, floor: int) -> None:
        """Remove the blobs that the doomed entries refer to."""
        names, broker = self._context.names, self._context.broker
        sequence = first
        while True:
            try:
                message = await broker.next(names.experiences_stream, names.blob_entries, sequence)
            except NotFound:
                return
            if message.sequence >= floor:
                return
            with contextlib.suppress(InvalidInput):
                reference = parse_outcome(message.data).blob
                await broker.purge_subject(names.blobs_stream, names.blob_chunks(reference.key))
            sequence = message.sequence + 1
