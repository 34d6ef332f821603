"""The buffer's memory: payloads stay only until the trainer has them, and those that no batch will use go as well."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from support.fakes.data.experience import make_group, make_task
from trinity.buffer.log.reader import LogReader
from trinity.data.wire import encode_outcome
from trinity.runtime.broker import StoredMessage
from trinity.runtime.names import RunNames

pytestmark = pytest.mark.core

NAMES = RunNames("run")


@functools.cache
def entry(sequence: int) -> Any:
    group = make_group(make_task(sequence))
    return StoredMessage(sequence, NAMES.experience("tester", 0, "sums"), encode_outcome(group), {})


class _Log:
    """A broker that counts what is read from it."""

    def __init__(self) -> None:
        self.read: list[int] = []

    async def get(self, stream: str, sequence: int) -> StoredMessage:
        self.read.append(sequence)
        return entry(sequence)


async def test_memory_holds_what_the_trainer_has_not_got() -> None:
    log = _Log()
    reader = LogReader(SimpleNamespace(broker=log, names=NAMES), 10**9)  # type: ignore[arg-type]
    for sequence in range(1, 9):
        await reader.take_for_batch(entry(sequence))
    assert [await reader.payload(sequence) for sequence in (5, 6)] and log.read == []
    reader.forget([5, 6], below=4)  # 1 to 3 were dropped
    for sequence in (4, 7, 8):
        await reader.payload(sequence)
    assert log.read == []
    for sequence in (5, 6, 1):
        assert await reader.payload(sequence) == (entry(sequence).data, "")
        await reader.payload(sequence)
    assert log.read == [5, 5, 6, 6, 1, 1], "what is sent again is read again, and is not kept"
    reader.forget([4, 7, 8], below=9)
    assert reader._cached == 0 and not reader._cache


async def test_an_archive_that_reads_the_log_keeps_nothing_in_memory() -> None:
    reader = LogReader(SimpleNamespace(broker=_Log(), names=NAMES), 10**9)  # type: ignore[arg-type]
    await reader.take(entry(1))
    assert not reader._cache
