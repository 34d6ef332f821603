"""Scoring functions by name. The core finds them by the entry points `trinity.scorers` of this distribution."""

from trinity.environments.countdown import countdown_reward
from trinity.environments.scorers.code import code_tests
from trinity.environments.scorers.math import (
    accuracy_reward,
    format_reward,
    math_boxed_reward,
    math_dapo_reward,
    math_reward,
)
from trinity.sdk.scoring import ScoreItem, Scorer, ScoreResult

SCORERS: dict[str, Scorer] = {
    "accuracy_reward": accuracy_reward,
    "format_reward": format_reward,
    "math_reward": math_reward,
    "math_boxed_reward": math_boxed_reward,
    "math_dapo_reward": math_dapo_reward,
    "countdown_reward": countdown_reward,
    "code_tests": code_tests,
}

__all__ = ["SCORERS", "ScoreItem", "ScoreResult", "Scorer"]
