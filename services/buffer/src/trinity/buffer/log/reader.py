"""Reading the experience log: check what was stored, and keep the newest payloads at hand."""

import itertools
import zlib
from collections import OrderedDict
from collections.abc import Iterable

from trinity.buffer.log.wire import LogEntry
from trinity.buffer.state.context import RunContext
from trinity.data.outcome_checks import LONGEST_NAME
from trinity.runtime import headers
from trinity.runtime.broker import Message, StoredMessage, blobs
from trinity.runtime.errors import DataLoss, InvalidInput, NotFound
from trinity.runtime.names import RunNames, owner_of


class LogReader:
    """Payloads by sequence, checked. Those that the trainer has not got yet stay in memory, up to `cache_bytes`."""

    def __init__(self, context: RunContext, cache_bytes: int) -> None:
        self._context = context
        self._cache: OrderedDict[int, tuple[bytes, str]] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached = 0

    async def take(self, message: Message | StoredMessage) -> LogEntry:
        """The entry in a message of the log, whole. Raises InvalidInput."""
        return (await self._whole(message))[0]

    async def take_for_batch(self, message: Message) -> LogEntry:
        """Like `take`. A group's payload stays in memory, until `forget`."""
        entry, payload = await self._whole(message)
        if entry.kind == "group":
            self._remember(message.sequence, payload)
        return entry

    async def _whole(self, message: Message | StoredMessage) -> tuple[LogEntry, tuple[bytes, str]]:
        data = message.data
        if message.headers.get(headers.CRC32) not in (None, str(zlib.crc32(data))):
            data = await self._once_more(message.sequence)
        entry, data = await whole_entry(self._context, message.subject, data)
        return entry, (data, message.headers.get(headers.TRACEPARENT, ""))

    async def _once_more(self, sequence: int) -> bytes:
        """The payload of an entry whose checksum was wrong, from another replica perhaps. InvalidInput if it stays."""
        try:
            message = await self._context.broker.get(self._context.names.experiences_stream, sequence)
        except NotFound:
            raise InvalidInput("checksum", f"of log entry {sequence} is another than its payload's") from None
        expected, found = message.headers.get(headers.CRC32), zlib.crc32(message.data)
        if expected != str(found):
            raise InvalidInput("checksum", f"of log entry {sequence} is {expected}, of its payload {found}")
        return message.data

    async def payload(self, sequence: int) -> tuple[bytes, str]:
        """A stored group as it was stored, and its trace context. DataLoss if the log does not hold it any more."""
        if sequence in self._cache:
            return self._cache[sequence]
        stream = self._context.names.experiences_stream
        try:
            message = await self._context.broker.get(stream, sequence)
        except NotFound:
            raise DataLoss(f"{stream} {sequence}: the group is gone") from None
        try:
            entry, payload = await self._whole(message)
        except InvalidInput as error:
            raise DataLoss(f"{stream} {sequence}: {error}") from None
        if entry.kind != "group":
            raise DataLoss(f"{stream} {sequence} is no group")
        return payload

    def forget(self, sent: Iterable[int], below: int) -> None:
        """Lets go of the groups that were sent to the trainer, and of all below a sequence, which no batch will use."""
        for sequence in [*sent, *itertools.takewhile(lambda sequence: sequence < below, self._cache)]:
            if sequence in self._cache:
                self._cached -= len(self._cache.pop(sequence)[0])

    def _remember(self, sequence: int, payload: tuple[bytes, str]) -> None:
        self._cache[sequence] = payload
        self._cached += len(payload[0])
        while self._cached > self._cache_bytes and len(self._cache) > 1:
            _, (gone, _) = self._cache.popitem(last=False)
            self._cached -= len(gone)


async def whole_entry(context: RunContext, subject: str, data: bytes) -> tuple[LogEntry, bytes]:
    """The entry in a payload, or in the blob that it refers to, and its own payload. Raises InvalidInput."""
    entry = LogEntry.parse(data)
    if entry.kind != "blob":
        return entry, data
    if not (owner := context.names.owner_in(subject)):
        raise InvalidInput("subject", f"is {subject}; a blob is an explorer's and lies under the explorer's subjects")
    reference = entry.reference
    try:
        data = await blobs.fetch(context.broker, context.names, owner, reference)
    except NotFound as error:
        raise InvalidInput("blob", f"{reference.key} is not there: {error}") from None
    entry = LogEntry.parse(data)
    if entry.kind not in ("group", "failure"):
        raise InvalidInput("blob", f"holds {entry.kind or 'nothing'}; only groups and failures lie in blobs")
    return entry, data


def check_owner(names: RunNames, subject: str, entry: LogEntry) -> None:
    """Raises InvalidInput unless the outcome is of the explorer below whose subjects it lies, or of the buffer.

    NATS lets an explorer publish only below its own subjects.
    """
    if entry.kind not in ("group", "failure"):
        if subject != names.control:
            raise InvalidInput(
                "subject", f"is {subject}; a {entry.kind} is the buffer's own and lies under {names.control}"
            )
        return
    explorer_id, owner = entry.explorer_id, names.owner_in(subject)
    if owner != owner_of(explorer_id):
        named = repr(explorer_id[:LONGEST_NAME])
        raise InvalidInput(
            "explorer_id", f"is {named}, but the entry lies under the subject of {owner or 'the buffer'}"
        )
