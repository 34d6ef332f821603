"""Operators that read only rewards."""

import math
import statistics
from collections.abc import Sequence

from trinity.buffer.operators.base import Draft, drop_all, rollouts
from trinity.data.experience import Task


class RewardFilter:
    """Keeps experiences with reward >= threshold; each step of a rollout by its own reward."""

    drops = "rewards below the threshold"

    def __init__(self, threshold: float = 0.0) -> None:
        self._threshold = threshold

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        drop_all([draft for draft in drafts if not draft.reward >= self._threshold])


class RewardStdFilter:
    """Drops the group if the population standard deviation of its rollouts' rewards is <= threshold."""

    drops = "no reward variance"

    def __init__(self, threshold: float = 0.0) -> None:
        self._threshold = threshold

    def __call__(self, drafts: list[Draft], task: Task) -> dict[str, float]:
        deviation = statistics.pstdev(rollout.reward for rollout in rollouts(drafts))  # exactly 0 for equal rewards
        if deviation <= self._threshold:
            drop_all(drafts)
        return {"reward_std": deviation}


class InvalidRewardFilter:
    """Drops experiences whose reward, or one of `required_metrics`, is not a finite number."""

    drops = "rewards or metrics that are not finite"

    def __init__(self, required_metrics: Sequence[str] = ()) -> None:
        self._required = required_metrics

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        for draft in drafts:
            needed = [draft.reward, *(draft.metrics.get(name, math.nan) for name in self._required)]
            if not all(math.isfinite(value) for value in needed):
                draft.drop()


class PassRateCalculator:
    """The share of the task's rollouts that passed: reward >= threshold, or reward > 0 without one. Changes nothing."""

    def __init__(self, threshold: float | None = None) -> None:
        self._threshold = threshold

    def __call__(self, drafts: list[Draft], task: Task) -> dict[str, float]:
        rate = statistics.fmean(self._passed(rollout.reward) for rollout in rollouts(drafts))
        return {"pass_rate": rate, f"{task.taskset}/pass_rate": rate}

    def _passed(self, reward: float) -> bool:
        return reward > 0 if self._threshold is None else reward >= self._threshold
