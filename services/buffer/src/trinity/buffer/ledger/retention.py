"""Retention of the log: entries that no kept checkpoint needs are purged once the log exceeds its share of the disk.

The log is never purged above what a kept checkpoint needs, nor above what the archives hold. Its limit
bounds what is fed, and grows only if a single batch does not fit and NATS has the room.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from trinity.buffer.ledger.entries import Ledger
from trinity.buffer.ledger.writer import LedgerWriter
from trinity.buffer.state.context import RunContext
from trinity.buffer.state.streams import TURNS, stream_specs
from trinity.buffer.tasks.feeder import Feeder
from trinity.data.wire import parse_outcome, reference_in
from trinity.runtime.broker import Broker, blobs, ensure_streams, on_subject
from trinity.runtime.errors import Conflict, Full, InvalidInput, NotFound
from trinity.runtime.metrics import Gauge
from trinity.runtime.names import RunNames

log = structlog.get_logger(__name__)

BYTES = Gauge("trinity_buffer_log_bytes", "Bytes of the experience log on the broker")

_LOOK_SECONDS = 1.0
# Above this part of its limit, the log is cut down.
_CUT = 0.5
_GROWTH = 1.25
# Looks, one a second, that find a batch without room before the limit grows.
_PATIENCE = 3


async def limits_of(broker: Broker, names: RunNames, limit: int) -> tuple[int, int]:
    """Limits of the log and the blobs in bytes: `limit`, or the size they had grown to, if they still need it."""
    log_bytes = blobs_bytes = limit
    streams = names.experiences_stream, names.blobs_stream, names.turns_stream
    with contextlib.suppress(NotFound):
        entries, beside, turns = [await broker.state(stream) for stream in streams]
        if _GROWTH * entries.bytes > limit:  # all of them have the least, whichever growth NATS refused
            least = min(entries.max_bytes, beside.max_bytes, int(turns.max_bytes / TURNS))
            log_bytes = blobs_bytes = max(limit, least)
        if _GROWTH * beside.bytes > log_bytes:
            blobs_bytes = max(log_bytes, beside.max_bytes)
    return log_bytes, blobs_bytes


class Retention:
    """Purges the log, its blobs, the queue of tasks, and the turns of ended tasks."""

    def __init__(
        self,
        context: RunContext,
        ledger: Ledger,
        writer: LedgerWriter,
        feeder: Feeder,
        mirrors: Sequence[Any],
        keep_bytes: int,
        replicas: int,
        evaluated_bytes: Callable[[], int],
    ) -> None:
        """`evaluated_bytes` returns the size of evaluations' blobs, which share the stream of the log's blobs."""
        self._context = context
        self._ledger = ledger
        self._writer = writer
        self.mirrors = mirrors
        self._replicas = replicas
        self._feeder = feeder
        self._keep_bytes = min(keep_bytes, int(_CUT * context.capacity.limit_bytes))
        self._first_sequence = 0
        self._looks_stuck = 0
        self._evaluated_bytes = evaluated_bytes
        self._is_refused = False  # by NATS: to let streams take more
        self._looking = asyncio.Lock()
        self._oldest_kept_step = 0
        self.log_bytes = 0

    @property
    def behind(self) -> int:
        """Log entries that an archive does not hold yet."""
        return max((self._writer.window.log_sequence - mirror.position for mirror in self.mirrors), default=0)

    async def open(self, oldest_kept_step: int) -> None:
        """Reads the state that earlier buffers left."""
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
        await self._cut_tasks()
        await self._ledger.release_cursors(self._oldest_kept_step)
        await self._look()
        return self._oldest_kept_step

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self) -> None:
        async with self._looking:
            await self._look_once()
        await self._context.changed.notify()

    async def _look_once(self) -> None:
        """Cut the log if it is too long, and say whether there is too little room all the same."""
        await self._cut_turns()
        await self._measure()
        if self.log_bytes > self._keep_bytes and await self._cut():
            await self._measure()
        room, evaluated = self._context.capacity, self._evaluated_bytes()
        if room.limit_bytes + evaluated > room.blobs_limit_bytes:  # else evaluations could leave the log no room
            await self._set_limits(room.limit_bytes, room.limit_bytes + int(_GROWTH * evaluated))
        full = room.is_full
        scarce = full or (room.entries > 0 and self._feeder.waits_for_room)
        if scarce and not room.is_low:
            log.warning("buffer.log.full", bytes=self.log_bytes, limit_bytes=room.limit_bytes)
        room.is_low = scarce
        self._looks_stuck = self._looks_stuck + 1 if full and self._is_stuck() else 0
        if self._looks_stuck >= _PATIENCE:
            self._looks_stuck = 0
            await self._grow()

    def _is_stuck(self) -> bool:
        """The trainer waits for a batch that does not fit, and no further checkpoint would make room for it."""
        newest = self._ledger.newest_step
        return self._context.wanted_step > newest and self._context.committed_step >= newest

    async def _grow(self) -> None:
        room = self._context.capacity
        log_bytes = int(_GROWTH * room.limit_bytes)
        if await self._set_limits(log_bytes, room.blobs_limit_bytes + log_bytes - room.limit_bytes):
            log.error("buffer.log.grown", limit_bytes=log_bytes, reason="the next batch does not fit into the log")

    async def _set_limits(self, log_bytes: int, blobs_bytes: int) -> bool:
        """Let the streams take more. Where NATS refuses that, False, and the limits stay as they are."""
        context = self._context
        specs = stream_specs(context.names, log_bytes=log_bytes, replicas=self._replicas, blobs_bytes=blobs_bytes)
        try:
            await ensure_streams(context.broker, specs)
        except (Full, Conflict) as error:
            if not self._is_refused:
                log.error("buffer.log.growth_refused", limit_bytes=context.capacity.limit_bytes, reason=str(error))
            self._is_refused = True
            return False
        self._is_refused = False
        context.capacity.limit_bytes, context.capacity.blobs_limit_bytes = log_bytes, blobs_bytes
        return True

    async def _measure(self) -> None:
        names, broker, window = self._context.names, self._context.broker, self._writer.window
        evaluated = self._evaluated_bytes()  # before the states: blobs purged meanwhile must not count
        state = await broker.state(names.experiences_stream)
        blobs = await broker.state(names.blobs_stream)
        self._first_sequence = state.first_sequence
        self.log_bytes = state.bytes + max(0, blobs.bytes - evaluated)
        BYTES.set(self.log_bytes)
        room = self._context.capacity
        room.bytes, room.entries, room.ended = self.log_bytes, state.messages, window.num_ended

    async def _cut(self) -> bool:
        """Removes messages of no further use. Returns True if there were any."""
        if self._oldest_kept_step < 1:
            return False
        names, broker = self._context.names, self._context.broker
        entry = await self._ledger.get(self._oldest_kept_step)
        archived = [mirror.position + 1 for mirror in self.mirrors]
        floor = min([entry.floor_sequence, *archived])
        if floor <= self._first_sequence:
            return False
        await self._cut_blobs(self._first_sequence, floor)
        await broker.purge_below(names.experiences_stream, floor)
        log.info("buffer.log.cut", below=floor, kept_step=self._oldest_kept_step)
        return True

    async def _cut_turns(self) -> None:
        """The turns of tasks that have ended are of no use."""
        names, broker = self._context.names, self._context.broker
        ordinals = {names.turn_of(subject)[0] for subject in await broker.subjects(names.turns_stream)}
        for ordinal in filter(self._writer.window.has_ended, ordinals):
            await broker.purge_subject(names.turns_stream, names.turns(ordinal))

    async def _cut_tasks(self) -> None:
        """Tasks that had ended in the ledger at the newest checkpoint are of no use.

        A buffer that starts again reads the log from its newest entry, and needs the tasks that end there once more. A
        task's sequence in the queue is its ordinal or higher.
        """
        below = min(self._writer.ended_through(self._context.committed_step), self._context.fed - 1)
        if below > 1:
            await self._context.broker.purge_below(self._context.names.tasks_stream, below)

    async def _cut_blobs(self, first: int, floor: int) -> None:
        """Remove the blobs that the doomed entries refer to."""
        names, broker = self._context.names, self._context.broker
        async for message in on_subject(broker, names.experiences_stream, names.blob_entries, first):
            if message.sequence >= floor:
                return
            with contextlib.suppress(InvalidInput):
                reference = reference_in(parse_outcome(message.data))
                blobs.check(reference)  # its key is part of a filter
                await broker.purge_subject(
                    names.blobs_stream, names.blob_chunks(names.owner_in(message.subject), reference.key)
                )
