"""Countdown in several attempts, its generator and its search."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fakes.environments.playing import play
from trinity.environments.arithmetic import evaluate, find_expression
from trinity.environments.countdown import Countdown, Puzzle, generate

pytestmark = pytest.mark.core

PUZZLE = {"nums": [10, 4, 4], "target": 24}


def test_a_right_answer_ends_and_a_wrong_one_is_explained() -> None:
    played = play(Countdown(), ["<answer>10+4+4</answer>", "<answer>(10-4)*4</answer>"], PUZZLE)
    assert "its value is 18" in played.observations[1].text
    assert "2 left" in played.observations[1].text
    assert (played.reward, played.won, played.last.metrics["attempts"]) == (1, True, 2)


def test_the_attempts_are_limited() -> None:
    played = play(Countdown(), ["<answer>1</answer>"] * 9, PUZZLE, {"max_attempts": 2})
    assert len(played.observations) == 3
    assert (played.last.done, played.reward) == (True, 0)


def test_a_strict_episode_wants_a_thought() -> None:
    answer = "<answer>(10-4)*4</answer>"
    assert not play(Countdown(), [answer], PUZZLE, {"reply_format": "strict"}).won
    assert play(Countdown(), [f"<think>hm</think>{answer}"], PUZZLE, {"reply_format": "strict"}).won


@given(st.lists(st.integers(1, 30), min_size=2, max_size=4), st.integers(-20, 200))
@settings(max_examples=60, deadline=None)
def test_every_expression_that_the_search_finds_is_right(numbers: list[int], target: int) -> None:
    found = find_expression(numbers, target)
    if found is not None:
        value, used = evaluate(found)
        assert (value, sorted(used)) == (target, sorted(numbers))


def test_the_search_finds_fractions_on_the_way_and_knows_when_there_is_nothing() -> None:
    assert evaluate(find_expression([8, 8, 3, 3], 24) or "")[0] == 24
    assert find_expression([1, 1, 1, 1], 24) is None
    assert find_expression([7], 7) == "7"


def test_generated_rows_can_be_solved_and_are_the_same_for_the_same_seed() -> None:
    rows = generate(30, seed=5)
    assert rows == generate(30, seed=5)
    assert rows != generate(30, seed=6)
    for row in rows:
        assert Puzzle.of(row).judge(find_expression(row["nums"], row["target"]) or "") == ""


@pytest.mark.parametrize("answer", ["9**9**9", "9" * 300, "(" * 100, "1e9", "四", "10-4*4\x00", "--" * 100 + "1"])
def test_hostile_answers_are_wrong_answers(answer: str) -> None:
    assert play(Countdown(), [f"<answer>{answer}</answer>"], PUZZLE).reward == 0
