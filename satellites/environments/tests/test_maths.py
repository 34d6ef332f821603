"""Maths in several attempts, and the reward in DAPO's style."""

import pytest

from support.fakes.environments.playing import play
from trinity.environments.maths import Maths
from trinity.environments.scorers import SCORERS, ScoreItem
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

GSM8K = {"question": "What is 6 times 7?", "answer": "6 * 7 = 42\n#### 42"}
DAPO = {
    "prompt": [{"role": "user", "content": "Simplify the root of 8."}],
    "reward_model": {"ground_truth": "2\\sqrt{2}"},
}


def test_a_wrong_answer_may_be_corrected() -> None:
    played = play(Maths(), ["<answer>41</answer>", "<answer>42</answer>"], GSM8K)
    assert played.observations[0].text.startswith("What is 6 times 7?")
    assert "Try again; 2 left" in played.observations[1].text
    assert (played.reward, played.won, played.last.metrics["attempts"]) == (1, True, 2)


def test_after_the_last_attempt_it_is_over() -> None:
    played = play(Maths(), ["<answer>1</answer>"] * 5, GSM8K)
    assert len(played.observations) == 4
    assert (played.reward, played.last.done, played.won) == (0, True, False)


@pytest.mark.parametrize(
    "reply",
    [
        "<think>a root</think><answer>\\sqrt{8}</answer>",
        "so \\boxed{2\\sqrt{2}}",
        "<answer>it is \\boxed{\\sqrt{8}}</answer>",
        "<think>first 7</think>\nAnswer: $2\\sqrt{2}$\nThat is all.",
    ],
)
def test_answers_may_stand_in_several_places_and_be_written_in_several_ways(reply: str) -> None:
    assert play(Maths(), [reply], DAPO).won


def test_a_number_in_the_thought_is_no_answer() -> None:
    assert play(Maths(), ["<think>42</think>"], GSM8K).last.metrics["invalid_format"] == 1


def test_a_strict_episode_wants_thought_and_answer() -> None:
    args = {"reply_format": "strict"}
    assert play(Maths(), ["<think>hm</think><answer>42</answer>"], GSM8K, args).won
    assert play(Maths(), ["\\boxed{42}"], GSM8K, args).last.metrics["invalid_format"] == 1


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({}, "task.question"),
        ({"question": "?"}, "task.answer"),
        ({"question": "?", "answer": True}, "task.answer"),
        ({"prompt": [], "answer": "1"}, "task.question"),
    ],
)
def test_a_row_without_question_or_answer_is_refused(row: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Maths().reset(row, {}, 0)
    assert refused.value.field == field


PENALTY = {"enable_overlong_penalty": True, "penalty_factor": 1.0, "max_response_length": 100, "cache_length": 20}


@pytest.mark.parametrize(("tokens", "reward"), [(0, 1), (80, 1), (90, 0.5), (100, 0), (500, 0)])
def test_dapos_penalty_of_long_replies_begins_in_the_cache_and_is_whole_at_the_limit(
    tokens: int, reward: float
) -> None:
    item = ScoreItem("?", "Answer: 42", "42", response_tokens=tokens)
    assert SCORERS["math_dapo_reward"](item, PENALTY).reward == pytest.approx(reward)


def test_dapos_reward_does_not_take_just_any_number() -> None:
    item = ScoreItem("?", "it may be 42", "42")
    assert SCORERS["math_dapo_reward"](item, {}).reward == 0
    assert SCORERS["accuracy_reward"](item, {}).reward == 1


def test_a_penalty_without_its_numbers_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"args.cache_length: is 0"):
        SCORERS["math_dapo_reward"](ScoreItem("?", "Answer: 42", "42"), {**PENALTY, "cache_length": 0})
