"""Advantage functions: rewards of the groups to one advantage per sequence."""

from collections.abc import Callable
from typing import Any

import torch

AdvantageFn = Callable[..., torch.Tensor]


def grpo(
    rewards_N: torch.Tensor, groups_N: torch.Tensor, *, epsilon: float = 1e-6, std_threshold: float | None = None
) -> torch.Tensor:
    """Group-relative advantage, [N]: (R - mean of the group) / (sample standard deviation of the group + epsilon).

    DeepSeekMath, arXiv:2402.03300, section 4.1. rewards_N float [N]; groups_N int [N], equal for members of a group. A
    group of one has mean 0 and deviation 1. Groups whose deviation is <= std_threshold get advantage 0.
    """
    advantages = torch.zeros_like(rewards_N)
    for group in groups_N.unique():
        members = groups_N == group
        rewards = rewards_N[members]
        if len(rewards) == 1:
            mean, std = rewards.new_zeros(()), rewards.new_ones(())
        else:
            mean, std = rewards.mean(), rewards.std(unbiased=True)
        if std_threshold is not None and (len(rewards) == 1 or std <= std_threshold):
            continue
        advantages[members] = (rewards - mean) / (std + epsilon)
    return advantages


ADVANTAGES: dict[str, AdvantageFn] = {"grpo": grpo}


def compute(name: str, args: dict[str, Any], rewards_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    return ADVANTAGES[name](rewards_N, groups_N, **args)
