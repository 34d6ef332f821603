"""REC's advantage: minus the mean, perhaps of a group in which failures do not outnumber successes."""

from typing import Literal

import numpy as np
import torch

from trinity.plugins import Positive, advantage
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, groups, mean_of, spread


@advantage("rec", source="arXiv:2509.24203")
def rec(
    rollouts: Rollouts,
    *,
    epsilon: Positive = 1e-6,
    std_normalize: bool = False,
    drop: Literal["balance"] | None = None,
) -> Advantages:
    """R - mean of the group, over (standard deviation with n, + epsilon) if std_normalize.

    drop = balance (its data dropping): if more rewards are below the mean than not, the surplus of lower rewards, drawn
    at random, gets advantage 0 and does not enter mean and deviation. For one remaining reward the mean is 0 and the
    deviation 1, so a group of one has advantage R.
    """
    returns = rollouts.returns_N
    generator = np.random.default_rng(rollouts.seed)
    scores = torch.zeros_like(returns)
    for members in groups(rollouts.groups_N):
        kept = members
        if drop == "balance" and len(members) > 1:
            kept = _balanced(returns, members, generator)
        rewards = returns[kept]
        mean, std = rewards.new_zeros(()), rewards.new_ones(())
        if len(kept) > 1:
            mean, std = mean_of(rewards), rewards.std(unbiased=False)
        scores[kept] = (rewards - mean) / (std + epsilon) if std_normalize else rewards - mean
    return spread(rollouts, scores)


def _balanced(returns_N: torch.Tensor, members: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    rewards = returns_N[members]
    lower = torch.nonzero(rewards < mean_of(rewards))[:, 0].numpy()
    excess = 2 * len(lower) - len(members)
    if excess <= 0:
        return members
    dropped = generator.permutation(lower)[:excess]
    keep = torch.ones(len(members), dtype=torch.bool)
    keep[torch.from_numpy(dropped)] = False
    return members[keep]
