"""Reading the experience log: check what was stored, and keep the newest payloads at hand."""

import zlib
from collections import OrderedDict
from collections.abc import Mapping

from trinity.api.common.v1 import experience_pb2
from trinity.buffer.shared import RunContext
from trinity.data.wire import parse_outcome
from trinity.runtime import headers
from trinity.runtime.broker import blobs
from trinity.runtime.errors import DataLoss, InvalidInput, NotFound


class LogReader:
    """Payloads by sequence, checked. At most `cache_bytes` of them stay in memory."""

    def __init__(self, context: RunContext, cache_bytes: int) -> None:
        self._context = context
        self._cache: OrderedDict[int, tuple[bytes, str]] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached = 0

    async def take(self, sequence: int, data: bytes, header: Mapping[str, str]) -> experience_pb2.Outcome:
        """The outcome in a message of the log, whole. Raises InvalidInput."""
        if header.get(headers.CRC32) not in (None, str(zlib.crc32(data))):
            data = await self._once_more(sequence)
        outcome, data = await whole_outcome(self._context, data)
        if outcome.WhichOneof("outcome") == "group":
            self._remember(sequence, data, header.get(headers.TRACEPARENT, ""))
        return outcome

    async def _once_more(self, sequence: int) -> bytes:
        """The payload of an entry whose checksum was wrong, from another replica perhaps. InvalidInput if it stays."""
        message = await self._context.broker.get(self._context.names.experiences_stream, sequence)
        expected, found = message.headers.get(headers.CRC32), zlib.crc32(message.data)
        if expected != str(found):
            raise InvalidInput("checksum", f"of log entry {sequence} is {expected}, of its payload {found}")
        return message.data

    async def payload(self, sequence: int) -> tuple[bytes, str]:
        """A stored group as it was stored, and its trace context. DataLoss if the log does not hold it any more."""
        stream = self._context.names.experiences_stream
        if sequence not in self._cache:
            try:
                message = await self._context.broker.get(stream, sequence)
            except NotFound:
                raise DataLoss(f"{stream} {sequence}: the group is gone") from None
            try:
                await self.take(sequence, message.data, message.headers)
            except InvalidInput as error:
                raise DataLoss(f"{stream} {sequence}: {error}") from None
        if sequence not in self._cache:
            raise DataLoss(f"{stream} {sequence} is no group")
        self._cache.move_to_end(sequence)
        return self._cache[sequence]

    def _remember(self, sequence: int, data: bytes, traceparent: str) -> None:
        if sequence in self._cache:
            return
        self._cache[sequence] = data, traceparent
        self._cached += len(data)
        while self._cached > self._cache_bytes and len(self._cache) > 1:
            _, (gone, _) = self._cache.popitem(last=False)
            self._cached -= len(gone)


async def whole_outcome(context: RunContext, data: bytes) -> tuple[experience_pb2.Outcome, bytes]:
    """The outcome in a payload, and its own payload if it lies in a blob. Raises InvalidInput."""
    outcome = parse_outcome(data)
    if outcome.WhichOneof("outcome") != "blob":
        return outcome, data
    try:
        data = await blobs.fetch(context.broker, context.names, outcome.blob)
    except NotFound as error:
        raise InvalidInput("blob", f"{outcome.blob.key} is not there: {error}") from None
    outcome = parse_outcome(data)
    if (kind := outcome.WhichOneof("outcome")) not in ("group", "failure"):
        raise InvalidInput("blob", f"holds {kind or 'nothing'}; only groups and failures lie in blobs")
    return outcome, data
