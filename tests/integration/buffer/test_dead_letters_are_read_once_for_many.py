"""Many callers that list, retry or drop dead letters at a time share reads, and delete each letter once."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trinity.api.common.v1 import experience_pb2
from trinity.buffer.log.dead_letters import DeadLetters
from trinity.runtime.broker import StoredMessage
from trinity.runtime.errors import NotFound
from trinity.runtime.names import RunNames

pytestmark = pytest.mark.core

CALLERS, LETTERS, FOREIGN = 32, 300, 700


class CountingBroker:
    """A stream in memory: what no letter is first, then letters. It counts what is read and deleted."""

    def __init__(self, names: RunNames) -> None:
        self.read = self.deleted = 0
        self.stored = {n: StoredMessage(n, names.dead_letter(n), b"\xff", {}) for n in range(1, FOREIGN + 1)}
        for n in range(FOREIGN + 1, FOREIGN + LETTERS + 1):
            letter = experience_pb2.AttemptFailure(final=True)
            letter.task.ordinal = n
            letter.task.task_id = str(n)
            self.stored[n] = StoredMessage(n, names.dead_letter(n), letter.SerializeToString(), {})

    async def several(self, stream: str, start: int, most: int, subject: str = "") -> list[StoredMessage]:
        await asyncio.sleep(0)
        found = [self.stored[n] for n in sorted(self.stored) if n >= start][:most]
        self.read += len(found)
        return found

    async def next(self, stream: str, subject: str, start: int) -> StoredMessage:
        if found := await self.several(stream, start, 1):
            return found[0]
        raise NotFound("none")

    async def delete(self, stream: str, sequence: int) -> None:
        await asyncio.sleep(0)
        self.deleted += 1
        self.stored.pop(sequence, None)


def made() -> tuple[DeadLetters, CountingBroker]:
    names = RunNames("r")
    broker = CountingBroker(names)
    context = SimpleNamespace(names=names, broker=broker)
    return DeadLetters(cast(Any, context), lambda _: False, lambda: LETTERS), broker


async def test_callers_at_the_same_time_share_reads_and_get_what_they_asked_for() -> None:
    letters, broker = made()
    answers = await asyncio.gather(*(letters.show(limit) for limit in range(1, CALLERS + 1)))
    assert [len(answer) for answer in answers] == list(range(1, CALLERS + 1))
    assert all(answer[0].ordinal == FOREIGN + 1 for answer in answers)
    assert broker.read <= 2 * (FOREIGN + LETTERS)


async def test_a_caller_that_comes_during_a_read_gets_a_later_one() -> None:
    letters, broker = made()
    early = asyncio.create_task(letters.show(1))
    while not broker.read:
        await asyncio.sleep(0)
    broker.stored.clear()
    assert await letters.show(1) == []
    await early


@pytest.mark.parametrize("method", ["drop", "retry"])
async def test_callers_that_change_all_share_a_read_and_delete_each_letter_once(method: str) -> None:
    letters, broker = made()
    change = getattr(letters, method)
    first = asyncio.create_task(change([]))
    while not broker.read:
        await asyncio.sleep(0)
    later = await asyncio.gather(*(change([]) for _ in range(CALLERS)))
    assert [len(await first), *map(len, later)] == [LETTERS] + [0] * CALLERS
    assert broker.deleted == LETTERS
    assert broker.read <= 2 * (FOREIGN + LETTERS)


async def test_a_caller_that_leaves_does_not_end_the_change_of_others() -> None:
    letters, broker = made()
    leaver, other = (asyncio.create_task(letters.drop([])) for _ in range(2))
    while not broker.read:
        await asyncio.sleep(0)
    leaver.cancel()
    assert len(await other) == LETTERS
    assert broker.deleted == LETTERS


async def test_a_caller_that_leaves_does_not_end_the_read_of_others() -> None:
    letters, _ = made()
    leaver, other = (asyncio.create_task(letters.show(5)) for _ in range(2))
    await asyncio.sleep(0)
    leaver.cancel()
    assert len(await other) == 5


async def test_letters_are_shown_without_their_tasks_images_and_fed_again_with_them() -> None:
    letters, broker = made()
    for n, message in broker.stored.items():
        if n > FOREIGN:
            letter = experience_pb2.AttemptFailure.FromString(message.data)
            letter.task.images.append(b"an image")
            broker.stored[n] = StoredMessage(n, message.subject, letter.SerializeToString(), {})
    shown, fed_again, one = await asyncio.gather(
        letters.show(LETTERS), letters._all(), letters.show(1, ordinal=FOREIGN + 1)
    )
    assert [len(letter.fields.task.images) for letter in [*shown, *one]] == [0] * (LETTERS + 1)
    assert {len(letter.fields.task.images) for _, letter in fed_again} == {1}
