"""Reading the experience log: check what was stored, and keep the newest payloads at hand."""

import zlib
from collections import OrderedDict
from collections.abc import Mapping

from trinity.api.common.v1 import experience_pb2
from trinity.buffer.shared import RunContext
from trinity.runtime import blobs, headers
from trinity.runtime.errors import DataLoss, NotFound
from trinity.runtime.wire import parse_outcome


class LogReader:
    """Payloads by sequence, checked. At most `cache_bytes` of them stay in memory."""

    def __init__(self, context: RunContext, cache_bytes: int) -> None:
        self._context = context
        self._cache: OrderedDict[int, tuple[bytes, str]] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached = 0

    async def take(self, sequence: int, data: bytes, header: Mapping[str, str]) -> experience_pb2.Outcome:
        """The outcome in a message of the log, whole. Raises DataLoss or InvalidInput."""
        expected = header.get(headers.CRC32)
        if expected is not None and int(expected) != zlib.crc32(data):
            raise DataLoss(f"{self._context.names.experiences_stream} {sequence}: the payload's checksum is wrong")
        outcome = parse_outcome(data)
        if outcome.WhichOneof("outcome") == "blob":
            data = await blobs.fetch(self._context.broker, self._context.names, outcome.blob)
            outcome = parse_outcome(data)
        if outcome.WhichOneof("outcome") == "group":
            self._remember(sequence, data, header.get(headers.TRACEPARENT, ""))
        return outcome

    async def payload(self, sequence: int) -> tuple[bytes, str]:
        """A stored group as it was stored, and its trace context. DataLoss if the log does not hold it any more."""
        stream = self._context.names.experiences_stream
        if sequence not in self._cache:
            try:
                message = await self._context.broker.get(stream, sequence)
            except NotFound:
                raise DataLoss(f"{stream} {sequence}: the group is gone") from None
            await self.take(sequence, message.data, message.headers)
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
