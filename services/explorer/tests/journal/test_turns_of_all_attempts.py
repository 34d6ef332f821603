"""What earlier attempts left of a task's episodes, whatever order their entries came in."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.api.common.v1 import experience_pb2
from trinity.data.experience import Limits, VersionSpan
from trinity.explorer.journal.turns import (
    DIGEST_BYTES,
    RETURNED,
    Entry,
    RecordedAnswer,
    RecordedTurn,
    digest,
    known_before,
)
from trinity.explorer.journal.wire import decode_entry, encode_abandoned, encode_answer, encode_turn
from trinity.explorer.types import Completion
from trinity.runtime.errors import FailureCause, InvalidInput
from trinity.sdk.contract import Answer

pytestmark = pytest.mark.core

LIMITS = Limits(100, 1000)


def turn(number: int, token: int = 7, episode: str = "0/0", version: int = 0) -> RecordedTurn:
    made = Completion(np.array([token], np.int32), np.array([-0.5], np.float32), (VersionSpan(version, 0, 1),), "stop")
    return RecordedTurn(episode, number, digest([token], []), made)


def entry(attempt: int, number: int, token: int = 7, episode: str = "0/0") -> Entry:
    return Entry(attempt, f"explorer-{attempt}", turn(number, token, episode))


def answered(number: int, token: int = 7) -> RecordedAnswer:
    step = Answer(f"after {token}", 0.5, False, "", {}, number + 1, b"state")
    return RecordedAnswer("0/0", number, turn(number, token).reply, step)


def answer(attempt: int, number: int, token: int = 7) -> Entry:
    return Entry(attempt, f"explorer-{attempt}", answered(number, token))


def answers(known: object) -> list[str | None]:
    kept = known.episodes["0/0"]  # type: ignore[attr-defined]
    return [one.answered.observation if one.answered else None for one in kept]


def tokens(known: object, episode: str = "0/0") -> list[int]:
    return [int(kept.turn.completion.token_ids[0]) for kept in known.episodes.get(episode, [])]  # type: ignore[attr-defined]


def test_a_later_attempt_continues_an_earlier_one() -> None:
    entries = [entry(1, 0, 10), entry(1, 1, 11), entry(2, 2, 22), entry(1, 0, 30, "1/0")]
    known = known_before(3, entries)
    assert tokens(known) == [10, 11, 22]
    assert tokens(known, "1/0") == [30]
    assert [kept.owner for kept in known.episodes["0/0"]] == ["explorer-1", "explorer-1", "explorer-2"]
    assert (known.progressed, known.fruitless) == (2, 0)


def test_a_process_whose_lease_ended_changes_nothing_of_the_next_holder() -> None:
    """It is still alive, and writes turns 1 and 2 after the next holder wrote its turn 1."""
    late = [entry(1, 0, 10), entry(2, 1, 21), entry(1, 1, 11), entry(1, 2, 12), entry(2, 2, 22)]
    assert tokens(known_before(3, late)) == [10, 21, 22]
    assert tokens(known_before(2, late)) == [10, 11, 12]


def test_an_attempt_that_failed_is_not_continued() -> None:
    failed = Entry(1, "explorer-1", FailureCause.TIMEOUT)
    assert tokens(known_before(2, [entry(1, 0, 10), failed])) == []
    assert tokens(known_before(3, [entry(1, 0, 10), failed, entry(2, 0, 20)])) == [20]


def test_attempts_that_get_no_further_begin_again_and_do_not_count_as_progress() -> None:
    first = [entry(1, 0), entry(1, 1)]
    assert [len(tokens(known_before(attempt, first))) for attempt in (2, 3, 4, 5, 9)] == [2, 2, 2, 0, 0]
    assert known_before(9, first).progressed == 1
    again = [*first, *(entry(attempt, number) for attempt in range(5, 9) for number in (0, 1))]
    assert known_before(9, again).progressed == 1
    further = [*again, entry(8, 2)]
    assert (known_before(9, further).progressed, known_before(9, further).fruitless) == (2, 0)
    assert len(tokens(known_before(9, further))) == 3


def test_an_attempt_that_gave_its_lease_back_is_none_of_those_that_died() -> None:
    returned = [Entry(attempt, "e", RETURNED) for attempt in (1, 3, 4, 6)]
    known = known_before(9, [entry(1, 0, 10), entry(3, 1, 11), *returned])
    assert (known.progressed, known.fruitless) == (4, 2), "each once, and 7 and 8 died"
    assert tokens(known) == [10, 11]
    assert known_before(10, [entry(1, 0), *returned]).episodes == {}


def test_a_turn_without_the_one_before_it_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"turn\.turn: is 2 of episode 0/0, which has 1 turns"):
        known_before(2, [entry(1, 0), entry(1, 2)])


def test_an_answer_belongs_to_the_reply_before_it() -> None:
    entries = [entry(1, 0, 10), answer(1, 0, 10), entry(1, 1, 11)]
    assert answers(known_before(2, entries)) == ["after 10", None]
    assert answers(known_before(3, [*entries, answer(2, 1, 11)])) == ["after 10", "after 11"]
    # A turn that is sampled again has no answer yet.
    assert answers(known_before(3, [*entries, entry(2, 0, 20)])) == [None]
    # A later attempt played reply 0 of the first one again, whose reply 1 answers something else.
    again = known_before(3, [*entries, answer(2, 0, 10)])
    assert (tokens(again), answers(again)) == ([10], ["after 10"])
    # Reply 2 was stored after its answer, or not at all.
    late = [*entries, answer(1, 2)]
    assert answers(known_before(2, late)) == ["after 10", None]
    assert answers(known_before(2, [*late, entry(1, 2)])) == ["after 10", None, "after 7"]
    assert answers(known_before(3, [*late, entry(2, 2)])) == ["after 10", None, None], "the reply of another attempt"


def test_an_answer_to_another_reply_is_left_out() -> None:
    """Attempt 1 had lost its lease, and sampled turn 1 again; attempt 2 had read the reply before that."""
    entries = [entry(1, 0, 10), entry(1, 1, 11), entry(1, 1, 12), answer(2, 1, 11), entry(2, 2, 22)]
    known = known_before(3, entries)
    assert (tokens(known), answers(known)) == ([10, 12, 22], [None, None, None])


def test_an_answer_is_progress() -> None:
    first = [entry(1, 0), answer(1, 0), entry(1, 1)]
    assert [known_before(attempt, first).fruitless for attempt in (2, 4)] == [0, 2]
    known = known_before(4, [*first, entry(2, 1), answer(3, 1)])
    assert (known.progressed, known.fruitless) == (2, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.integers(0, 3), st.integers(0, 5)), max_size=40))
def test_turns_are_those_of_one_line_of_attempts(written: list[tuple[bool, int, int, int]]) -> None:
    """Whatever was written: turns are contiguous and have their answers, attempts do not decrease, and progress is
    bounded by attempts."""
    entries = [(entry if is_turn else answer)(attempt, number, token) for is_turn, attempt, number, token in written]
    try:
        known = known_before(6, entries)
    except InvalidInput:
        return
    kept = known.episodes.get("0/0", [])
    assert [one.turn.turn for one in kept] == list(range(len(kept)))
    assert [one.owner for one in kept] == sorted(one.owner for one in kept)
    assert known.progressed <= 4
    for one, token in zip(kept, tokens(known), strict=True):
        assert one.answered in (None, answered(one.turn.turn, token).answer)


def test_a_turn_travels_unchanged() -> None:
    spans = (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
    made = Completion(np.array([1, 2, 3], np.int32), np.array([-1, -2, -3], np.float32), spans, "length")
    sent = RecordedTurn("0.1/2", 5, digest([1], [0.5]), made)
    came = decode_entry(encode_turn(sent), LIMITS)
    assert isinstance(came, RecordedTurn)
    assert (came.episode, came.turn, came.seen) == (sent.episode, 5, sent.seen)
    assert came.completion.token_ids.tolist() == [1, 2, 3]
    assert came.completion.logprobs.tolist() == [-1, -2, -3]
    assert (came.completion.version_spans, came.completion.finish_reason) == (spans, "length")
    assert decode_entry(encode_abandoned(FailureCause.TIMEOUT), LIMITS) == FailureCause.TIMEOUT
    over = replace(answered(5), answer=Answer("over", 1.5, True, '{"a": [1]}', {"at": 2.0}, 6))
    assert decode_entry(encode_answer(over), LIMITS) == over


def damaged(**fields: object) -> bytes:
    message = experience_pb2.TurnEntry.FromString(encode_turn(turn(0)))
    for name, value in fields.items():
        if name in ("token_ids", "logprobs"):
            getattr(message.turn, name).data = value
        elif name == "version":
            message.turn.version_spans[0].version = value  # type: ignore[assignment]
        elif name == "end":
            message.turn.version_spans[0].end = value  # type: ignore[assignment]
        else:
            setattr(message.turn, name, value)
    return message.SerializeToString()


def damaged_answer(**fields: object) -> bytes:
    message = experience_pb2.TurnEntry.FromString(encode_answer(answered(0)))
    for name, value in fields.items():
        setattr(message.answered.answer if name == "reward" else message.answered, name, value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff", "is no trinity.api.common.v1.TurnEntry"),
        (b"", "is empty, must hold"),
        (damaged(episode=""), "turn.episode: has 0 characters"),
        (damaged(episode="x" * 201), "turn.episode: has 201"),
        (damaged(turn=-1), "turn.turn: is -1"),
        (damaged(seen=b"short"), f"turn.seen: has 5 bytes, must have {DIGEST_BYTES}"),
        (damaged(finish_reason="abort"), "turn.finish_reason: is 'abort'"),
        (damaged(token_ids=b"123"), "turn.token_ids.data: has 3 bytes"),
        (damaged(token_ids=np.array([1000], np.int32).tobytes()), "turn.token_ids: has 1000"),
        (damaged(token_ids=np.array([-1], np.int32).tobytes()), "turn.token_ids: has -1"),
        (damaged(logprobs=np.array([np.nan], np.float32).tobytes()), "turn.logprobs: has nan"),
        (damaged(logprobs=np.array([0.5], np.float32).tobytes()), "turn.logprobs: has 0.5"),
        (damaged(version=-1), "turn.version_spans"),
        (damaged(end=2), "turn.version_spans"),
        (damaged_answer(episode=""), "turn.episode: has 0 characters"),
        (damaged_answer(turn=-1), "turn.turn: is -1"),
        (damaged_answer(reward=float("nan")), "turn.answer: cannot be right: its reward is nan"),
    ],
)
def test_a_damaged_entry_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        decode_entry(data, LIMITS)
    assert said in str(refused.value)


def test_another_prompt_or_reward_is_another_digest() -> None:
    known = {
        digest(*args)
        for args in (([1, 2], [0.0]), ([1, 2], [1.0]), ([1], [0.0]), ([2, 1], [0.0]), ([1, 2], []), ([1, 2, 0], []))
    }
    assert len(known) == 6


def part(begin: int, tokens: list[int], reason: str = "open", attempt: int = 1, seen: int = 0) -> Entry:
    count = len(tokens)
    spans = (VersionSpan(attempt, 0, count),)
    made = Completion(np.array(tokens, np.int32), np.full(count, -0.5, np.float32), spans, reason)
    return Entry(attempt, f"explorer-{attempt}", RecordedTurn("0/0", 0, digest([seen], []), made, begin))


def test_parts_of_a_reply_are_joined() -> None:
    known = known_before(3, [part(0, [1, 2]), part(2, [3, 4]), part(4, [5], "stop", attempt=2)])
    (kept,) = known.episodes["0/0"]
    assert kept.turn.completion.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert kept.turn.completion.version_spans == (VersionSpan(1, 0, 4), VersionSpan(2, 4, 5))
    assert (kept.parts, kept.turn.completion.finish_reason) == (((0, "explorer-1"), (4, "explorer-2")), "stop")
    assert (known.progressed, known.fruitless) == (2, 0)


@pytest.mark.parametrize(
    "entries",
    [
        [part(2, [3])],
        [part(0, [1, 2]), part(1, [3])],
        [part(0, [1, 2], "stop"), part(2, [3])],
        [part(0, [1, 2]), part(2, [3], seen=9)],
    ],
)
def test_a_part_without_what_it_continues_is_refused(entries: list[Entry]) -> None:
    with pytest.raises(InvalidInput, match=r"turn\.begin"):
        known_before(2, entries)


def test_parts_are_written_and_read() -> None:
    sent = part(2, [3, 4]).turn
    assert isinstance(sent, RecordedTurn)
    read = decode_entry(encode_turn(sent), LIMITS)
    assert isinstance(read, RecordedTurn) and (read.begin, read.completion.finish_reason) == (2, "open")
