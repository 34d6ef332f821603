"""Reading the experience log: check what was stored, and keep the newest payloads at hand."""

import zlib
from collections import OrderedDict
from collections.abc import Mapping

from trinity.api.common.v1 import experience_pb2
from trinity.buffer.shared import RunContext
from trinity.runtime import blobs, headers
from trinity.runtime.errors import DataLoss
from trinity.runtime.wire import parse_outcome


class LogReader:
    """Outcomes by sequence. At most `cache_bytes` of payloads stay in memory."""

    def __init__(self, context: RunContext, cache_bytes: int) -> None:
        self._context = context
        self._cache: OrderedDict[int, tuple[experience_pb2.Outcome, str, int]] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached = 0

    async def take(self, sequence: int, data: bytes, header: Mapping[str, str]) -> experience_pb2.Outcome:
        """The outcome in a message of the log, whole. Raises DataLoss or InvalidInput."""
        expected = header.get(headers.CRC32)
        if expected is not None and int(expected) != zlib.crc32(data):
            raise DataLoss(f"{self._context.names.experiences_stream} {sequence}: the payload's checksum is wrong")
        outcome = parse_outcome(data)
        if outcome.WhichOneof("outcome") == "blob":
            whole = await blobs.fetch(self._context.broker, self._context.names, outcome.blob)
            outcome, data = parse_outcome(whole), whole
        self._remember(sequence, outcome, header.get(headers.TRACEPARENT, ""), len(data))
        return outcome

    async def group(self, sequence: int) -> tuple[experience_pb2.Group, str]:
        """A stored group and its trace context. DataLoss if the log does not hold it any more."""
        if sequence not in self._cache:
            message = await self._context.broker.get(self._context.names.experiences_stream, sequence)
            await self.take(sequence, message.data, message.headers)
        outcome, traceparent, _ = self._cache[sequence]
        self._cache.move_to_end(sequence)
        if outcome.WhichOneof("outcome") != "group":
            raise DataLoss(f"{self._context.names.experiences_stream} {sequence} is no group")
        return outcome.group, traceparent

    def _remember(self, sequence: int, outcome: experience_pb2.Outcome, traceparent: str, size: int) -> None:
        if sequence in self._cache:
            return
        self._cache[sequence] = (outcome, traceparent, size)
        self._cached += size
        while self._cached > self._cache_bytes and len(self._cache) > 1:
            _, (_, _, gone) = self._cache.popitem(last=False)
            self._cached -= gone
