"""The ledger: which experience each optimizer step consumes. Written once, read for ever.

One message per step, appended at exactly the next sequence of the stream: two buffers can never both write a step.
A message counts if it is an entry of this run under its step's subject, the first one there; others are stepped over.
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import replace

from trinity.buffer.ledger.wire import Entry, Skip, decode_entry, decode_skip, digest_of, encode_entry, encode_skip
from trinity.buffer.state.context import RunContext
from trinity.buffer.state.streams import append_past_others, newest_of_ours
from trinity.runtime.broker import StoredMessage, on_subject
from trinity.runtime.errors import DataLoss, NotFound, TrinityError

_CACHED_ENTRIES = 64
_READ_AHEAD = 256
# A longer cursor goes into a separate stream: only the newest is read again, and by forks those since a checkpoint.
_LONG_CURSOR_BYTES = 32 * 1024
_HEADROOM_BYTES = 16_384  # of NATS's message limit, for headers


class EntryTooLarge(TrinityError):
    """NATS takes no message of this size. Another start finds the same."""

    for_good = True


class Ledger:
    """Ledger of one run. `open` first."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._stream = context.names.batches_stream
        self._sequence = 0
        self._looked = 1  # no earlier step since the oldest kept checkpoint has a long cursor
        self._cache: OrderedDict[int, Entry] = OrderedDict()
        self.newest: Entry | None = None
        self.skipped: dict[int, str] = {}  # step -> reason
        self.skipping = asyncio.Lock()  # no batch is sent while one may be skipped

    @property
    def newest_step(self) -> int:
        return self.newest.step if self.newest is not None else 0

    async def open(self) -> None:
        """Find the newest entry."""
        self._sequence = (await self._context.broker.state(self._stream)).last_sequence
        message = await newest_of_ours(self._context.broker, self._stream, self._is_in_the_chain)
        if message is not None:
            self.newest = self._entry(message)
            assert self.newest is not None
            self._remember(self.newest)
        await self._read_skips()

    async def _read_skips(self) -> None:
        async for message in on_subject(self._context.broker, self._stream, self._context.names.skips):
            skip = decode_skip(message.data)
            if skip and skip.run == self._context.run and message.subject == self._context.names.skip(skip.step):
                self.skipped.setdefault(skip.step, skip.reason)

    async def skip(self, step: int, reason: str) -> Entry:
        """Have the trainer pass a step, in every replay too; the first reason stays. NotFound without an entry."""
        await self.get(step)
        if step not in self.skipped:
            now = time.time()
            skip = encode_skip(Skip(self._context.run, step, reason, now))
            await self._context.broker.publish(self._context.names.skip(step), skip, message_id=f"skip/{step}/{now}")
            await self._read_skips()
        return await self.get(step)

    def _entry(self, message: StoredMessage) -> Entry | None:
        """The entry in a message, if it is one of this run that may stand where it does."""
        entry = decode_entry(message.data)
        if entry is None:
            return None
        fits = entry.run == self._context.run and 1 <= entry.step <= message.sequence  # every earlier step lies below
        entry = replace(entry, sha256=digest_of(entry))
        return entry if fits and message.subject == self._context.names.batch(entry.step) else None

    async def _first(self, step: int) -> tuple[StoredMessage, Entry] | None:
        """The entry of a step, and its message. What came later under the same subject does not count."""
        async for message in on_subject(self._context.broker, self._stream, self._context.names.batch(step)):
            if (entry := self._entry(message)) is not None:
                return message, entry
        return None

    async def _is_in_the_chain(self, message: StoredMessage) -> bool:
        """Returns True for the first entry of its step, if it follows the entry of the step before."""
        entry = self._entry(message)
        if entry is None:
            return False
        first = await self._first(entry.step)
        before = await self._first(entry.step - 1) if entry.step > 1 else None
        follows = entry.step == 1 or (before is not None and before[0].sequence < message.sequence)
        return follows and first is not None and first[0].sequence == message.sequence

    async def _is_next(self, message: StoredMessage) -> bool:
        entry = self._entry(message)
        return entry is not None and entry.step == self.newest_step + 1

    async def cursor(self) -> bytes:
        """The cursor of the newest entry: where the reader of the log stood. Empty without an entry."""
        return b"" if self.newest is None else await self.cursor_of(self.newest)

    async def cursor_of(self, entry: Entry) -> bytes:
        """The cursor of an entry. DataLoss if it was long and is gone: see `release_cursors`."""
        if not entry.cursor_sequence:
            return entry.cursor
        stream = self._context.names.cursors_stream
        try:
            return (await self._context.broker.get(stream, entry.cursor_sequence)).data
        except NotFound:
            raise DataLoss(f"{stream}: the cursor of step {entry.step} is gone: no run can begin from it") from None

    async def append(self, entry: Entry) -> None:
        """Write the entry of the next step. SequenceConflict if another buffer wrote meanwhile."""
        if entry.step != self.newest_step + 1:
            raise ValueError(f"step {entry.step} cannot follow step {self.newest_step}")
        entry = replace(entry, previous_sha256=self.newest.sha256 if self.newest is not None else b"")
        entry = replace(entry, sha256=digest_of(entry))
        if len(entry.cursor) > _LONG_CURSOR_BYTES:
            entry = await self._with_cursor_aside(entry)
        data = encode_entry(entry)
        experiences = sum(len(group.kept) for group in entry.groups)
        self._check_size(
            len(data),
            f"step {entry.step}: its ledger entry of {len(entry.groups)} groups and {experiences} experiences that "
            f"operators changed ({', '.join(entry.operators) or 'none'})",
            "lower buffer.batch_size, leave out an operator of data_processor.experience_pipeline.operators",
        )
        self._sequence = await append_past_others(
            self._context.broker,
            self._context.names.batch(entry.step),
            self._stream,
            lambda _: data,
            message_id=f"batch/{entry.step}",
            last_sequence=self._sequence,
            is_ours=self._is_next,
        )
        if entry.cursor_sequence:
            await self._make_room(entry.cursor_sequence)
        self.newest = entry
        self._remember(entry)

    async def _make_room(self, newest: int) -> None:
        """Removes the older half of the long cursors once they fill half of their stream."""
        stream = self._context.names.cursors_stream
        state = await self._context.broker.state(stream)
        if 2 * state.bytes > state.max_bytes:
            await self._context.broker.purge_below(stream, (state.first_sequence + newest + 1) // 2)

    async def release_cursors(self, oldest_kept_step: int) -> None:
        """Removes the long cursors of steps before the oldest kept checkpoint's: no run can begin there."""
        if oldest_kept_step < 1:
            return
        self._looked = max(self._looked, oldest_kept_step)
        while self._looked < self.newest_step and not (await self.get(self._looked)).cursor_sequence:
            self._looked += 1
        if sequence := (await self.get(self._looked)).cursor_sequence:
            await self._context.broker.purge_below(self._context.names.cursors_stream, sequence)

    async def _with_cursor_aside(self, entry: Entry) -> Entry:
        """The entry names the sequence that its cursor got, so a cursor of another buffer is never taken for it."""
        self._check_size(
            len(entry.cursor),
            f"step {entry.step}: the state of all tasks, with the groups that wait for a later step",
            "lower buffer.trainer_input.experience_buffer.capacity (of fully_async and replay)",
        )
        stored = await self._context.broker.publish(
            self._context.names.cursor,
            entry.cursor,
            message_id=f"cursor/{entry.step}/{entry.created_at_seconds}",
        )
        return replace(entry, cursor=b"", cursor_sequence=stored.sequence)

    def _check_size(self, size: int, what: str, fix: str) -> None:
        if size > (most := self._context.broker.most_bytes - _HEADROOM_BYTES):
            problem = f"{what} has {size} bytes, and a message of NATS may have {most}"
            raise EntryTooLarge(f"{problem}: {fix}, or raise max_payload of nats-server")

    async def task_ids(self) -> set[str]:
        """Ids of all tasks in the ledger: trained, dropped or cut."""
        found: set[str] = set()
        subject = self._context.names.subjects("batches")
        async for message in on_subject(self._context.broker, self._stream, subject, read_ahead=_READ_AHEAD):
            if (entry := self._entry(message)) is not None:
                found |= {group.task_id for group in entry.groups} | {task.task_id for task in entry.cut}
                found |= {drop.task_id for drop in entry.dropped}
        return found

    async def get(self, step: int) -> Entry:
        """NotFound if the step has no entry yet; DataLoss if it had one and it is gone."""
        return replace(await self._get(step), skip_reason=self.skipped.get(step, ""))

    async def _get(self, step: int) -> Entry:
        if step in self._cache:
            return self._cache[step]
        if step < 1 or step > self.newest_step:
            raise NotFound(f"step: {step} has no ledger entry; the newest is {self.newest_step}")
        found = await self._first(step)
        if found is None:
            raise DataLoss(f"step: the ledger entry of step {step} is gone from {self._stream}")
        self._remember(found[1])
        return found[1]

    def _remember(self, entry: Entry) -> None:
        self._cache[entry.step] = entry
        while len(self._cache) > _CACHED_ENTRIES:
            self._cache.popitem(last=False)
