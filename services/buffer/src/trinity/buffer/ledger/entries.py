"""The ledger: which experience each optimizer step consumes. Written once, read for ever.

One message per step, appended at exactly the next sequence of the stream: two buffers can never both write a step.
"""

from collections import OrderedDict

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.buffer.shared import RunContext
from trinity.runtime.errors import DataLoss, NotFound

_CACHED_ENTRIES = 64
# A cursor longer than this is kept in a short ring of its own: only the newest one is ever read again.
_LONG_CURSOR_BYTES = 32 * 1024


class Ledger:
    """Ledger of one run. `open` first."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._stream = context.names.batches_stream
        self._sequence = 0
        self._cache: OrderedDict[int, pb.LedgerEntry] = OrderedDict()
        self.newest: pb.LedgerEntry | None = None

    @property
    def newest_step(self) -> int:
        return self.newest.step if self.newest is not None else 0

    async def open(self) -> None:
        """Find the newest entry."""
        state = await self._context.broker.state(self._stream)
        self._sequence = state.last_sequence
        if state.messages:
            message = await self._context.broker.get(self._stream, state.last_sequence)
            self.newest = pb.LedgerEntry.FromString(message.data)
            self._remember(self.newest)

    async def cursor(self) -> pb.LedgerCursor:
        """Where the reader of the log stood at the newest entry."""
        if self.newest is None:
            return pb.LedgerCursor()
        if not self.newest.cursor_sequence:
            return self.newest.cursor
        stream = self._context.names.cursors_stream
        try:
            message = await self._context.broker.get(stream, self.newest.cursor_sequence)
        except NotFound:
            raise DataLoss(f"{stream}: the cursor of step {self.newest_step} is gone") from None
        return pb.LedgerCursor.FromString(message.data)

    async def append(self, entry: pb.LedgerEntry) -> None:
        """Write the entry of the next step. SequenceConflict if another buffer wrote meanwhile."""
        if entry.step != self.newest_step + 1:
            raise ValueError(f"step {entry.step} cannot follow step {self.newest_step}")
        if entry.cursor.ByteSize() > _LONG_CURSOR_BYTES:
            await self._put_cursor_aside(entry)
        data = entry.SerializeToString()
        self._sequence = await self._context.broker.append(
            self._context.names.batch(entry.step),
            self._stream,
            data,
            message_id=f"batch/{entry.step}",
            last_sequence=self._sequence,
        )
        # Read anew: a message that held a long cursor keeps its memory.
        self.newest = pb.LedgerEntry.FromString(data)
        self._remember(self.newest)

    async def _put_cursor_aside(self, entry: pb.LedgerEntry) -> None:
        """The entry names the sequence it got, so a cursor of another buffer is never taken for it."""
        stored = await self._context.broker.publish(
            self._context.names.cursor,
            entry.cursor.SerializeToString(),
            message_id=f"cursor/{entry.step}/{entry.created_at_seconds}",
        )
        entry.cursor_sequence = stored.sequence
        entry.ClearField("cursor")

    async def get(self, step: int) -> pb.LedgerEntry:
        """NotFound if the step has no entry yet; DataLoss if it had one and it is gone."""
        if step in self._cache:
            return self._cache[step]
        if step < 1 or step > self.newest_step:
            raise NotFound(f"step: {step} has no ledger entry; the newest is {self.newest_step}")
        try:
            message = await self._context.broker.last(self._stream, self._context.names.batch(step))
        except NotFound:
            raise DataLoss(f"step: the ledger entry of step {step} is gone from {self._stream}") from None
        entry = pb.LedgerEntry.FromString(message.data)
        self._remember(entry)
        return entry

    def _remember(self, entry: pb.LedgerEntry) -> None:
        self._cache[entry.step] = entry
        while len(self._cache) > _CACHED_ENTRIES:
            self._cache.popitem(last=False)
