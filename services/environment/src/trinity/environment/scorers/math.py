"""Maths answers: is the reply's answer the reference's?"""

import re
from typing import Any

from trinity.environment.scorers.answers import given_answer, last_boxed, reference_answer, same_answer
from trinity.environment.scorers.base import ScoreItem, ScoreResult

_THINK_THEN_ANSWER = re.compile(
    r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL
)
_FORMAT_REWARD = 0.1


def _accuracy(answer: str | None, truth: str) -> float:
    return float(answer is not None and same_answer(answer, reference_answer(truth)))


def accuracy_reward(item: ScoreItem, args: dict[str, Any]) -> ScoreResult:
    """1 if the answer is right, else 0. The answer: \\boxed{}, else <answer>, else after ####, else the last number."""
    accuracy = _accuracy(given_answer(item.response), item.truth)
    return ScoreResult(accuracy, {"accuracy": accuracy})


def math_reward(item: ScoreItem, args: dict[str, Any]) -> ScoreResult:
    """Accuracy, plus 0.1 if the reply is <think>...</think><answer>...</answer> and minus 0.1 if it is not."""
    accuracy = _accuracy(given_answer(item.response), item.truth)
    well_formed = len(item.response) <= 1_000_000 and bool(_THINK_THEN_ANSWER.fullmatch(item.response))
    form = _FORMAT_REWARD if well_formed else -_FORMAT_REWARD
    return ScoreResult(accuracy + form, {"accuracy": accuracy, "format_score": form})


def math_boxed_reward(item: ScoreItem, args: dict[str, Any]) -> ScoreResult:
    """1 if the last \\boxed{} is right, else 0. With args `with_think`: minus 0.1 without <think>...</think>."""
    accuracy = _accuracy(last_boxed(item.response), item.truth)
    form = 0.0
    if args.get("with_think"):
        opened, closed = item.response.find("<think>"), item.response.find("</think>")
        form = 0.0 if 0 <= opened < closed else -_FORMAT_REWARD
    return ScoreResult(accuracy + form, {"accuracy": accuracy, "format_score": form})
