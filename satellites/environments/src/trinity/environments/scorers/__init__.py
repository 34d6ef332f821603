"""Scoring functions by name."""

from trinity import plugins
from trinity.environments.countdown import countdown_reward
from trinity.environments.scorers.code import code_tests
from trinity.environments.scorers.math import (
    accuracy_reward,
    format_reward,
    math_boxed_reward,
    math_dapo_reward,
    math_reward,
)
from trinity.sdk.scoring import GroupScorer, ScoreItem, Scorer, ScoreResult

SCORERS: dict[str, Scorer] = {
    "accuracy_reward": accuracy_reward,
    "format_reward": format_reward,
    "math_reward": math_reward,
    "math_boxed_reward": math_boxed_reward,
    "math_dapo_reward": math_dapo_reward,
    "countdown_reward": countdown_reward,
    "code_tests": code_tests,
}


def find_scorer(name: str) -> Scorer | None:
    """A built-in scorer, or a reward function of a plugin."""
    if name in SCORERS:
        return SCORERS[name]
    function = plugins.REWARD_FUNCTIONS.get(name)
    return GroupScorer(function) if function and name in plugins.GROUP_REWARD_FUNCTIONS else function


def scorer_names() -> list[str]:
    return sorted({*SCORERS, *plugins.REWARD_FUNCTIONS})


__all__ = ["SCORERS", "ScoreItem", "ScoreResult", "Scorer", "find_scorer", "scorer_names"]
