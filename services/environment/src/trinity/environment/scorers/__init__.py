"""Scoring functions by name."""

from trinity.environment.scorers.base import ScoreItem, Scorer, ScoreResult
from trinity.environment.scorers.countdown import countdown_reward
from trinity.environment.scorers.math import accuracy_reward, math_boxed_reward, math_reward

SCORERS: dict[str, Scorer] = {
    "accuracy_reward": accuracy_reward,
    "math_reward": math_reward,
    "math_boxed_reward": math_boxed_reward,
    "countdown_reward": countdown_reward,
}

__all__ = ["SCORERS", "ScoreItem", "ScoreResult", "Scorer"]
