"""Messages of a subject are read in few questions where many are, and all of them whatever an answer leaves out."""

from typing import Any, cast

import pytest

from trinity.runtime.broker import Broker, StoredMessage, on_subject
from trinity.runtime.errors import NotFound

pytestmark = pytest.mark.core


class FakeBroker:
    """A stream with these sequences, whose answers to `several` have at most `most_given` messages."""

    def __init__(self, sequences: list[int], most_given: int) -> None:
        self._sequences, self._most_given = sequences, most_given
        self.questions = 0

    def _from(self, sequence: int) -> list[StoredMessage]:
        self.questions += 1
        return [StoredMessage(one, "s", b"", {}) for one in self._sequences if one >= sequence]

    async def next(self, stream: str, subject: str, sequence: int) -> StoredMessage:
        if not (found := self._from(sequence)):
            raise NotFound("none")
        return found[0]

    async def several(self, stream: str, sequence: int, most: int, subject: str) -> list[StoredMessage]:
        return self._from(sequence)[: min(most, self._most_given)]


async def read(broker: FakeBroker, **options: Any) -> list[int]:
    return [message.sequence async for message in on_subject(cast(Broker, broker), "S", "s", **options)]


@pytest.mark.parametrize("most_given", [0, 1, 7, 100])
async def test_all_are_read_whatever_an_answer_holds(most_given: int) -> None:
    sequences = [1, 2, 5, 6, 7, 20, *range(30, 80)]
    assert await read(FakeBroker(sequences, most_given), read_ahead=10) == sequences
    assert await read(FakeBroker(sequences, most_given), read_ahead=10, from_sequence=6) == sequences[3:]


async def test_a_thousand_messages_take_few_questions() -> None:
    broker = FakeBroker(list(range(1, 1001)), 256)
    assert len(await read(broker, read_ahead=256)) == 1000
    assert broker.questions < 12
