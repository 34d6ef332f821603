"""OPMD: rewards minus a baseline in place of the partition function of the mirror-descent step."""

import math
from typing import Literal

import torch

from trinity.plugins import NonNegative, advantage, algorithm
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, groups, mean_of, spread


def opmd_scores(returns_N: torch.Tensor, groups_N: torch.Tensor, opmd_baseline: str, tau: float) -> torch.Tensor:
    """R - b, [N]: b is the group's mean, or tau (logsumexp(R / tau) - log n). A group of one has b = 0."""
    scores = returns_N.clone()
    for members in groups(groups_N):
        if len(members) > 1:
            scores[members] -= _baseline(returns_N[members], opmd_baseline, tau)
    return scores


def _baseline(rewards: torch.Tensor, kind: str, tau: float) -> torch.Tensor:
    if kind == "mean" or bool((rewards == rewards[0]).all()):
        return mean_of(rewards)
    if tau == 0:
        return rewards.max()  # the limit
    return tau * (torch.logsumexp(rewards / tau, 0) - math.log(len(rewards)))


Baseline = Literal["mean", "logavgexp"]


@advantage("opmd", also=["opmd_verl"], source="arXiv:2505.17826v1, A; arXiv:2501.12599, 2.3.2")
def opmd(rollouts: Rollouts, *, opmd_baseline: Baseline = "mean", tau: NonNegative = 1.0) -> Advantages:
    """R - b, b the mean of the group or tau (logsumexp(R / tau) - log n)."""
    return spread(rollouts, opmd_scores(rollouts.returns_N, rollouts.groups_N, opmd_baseline, tau))


algorithm("opmd", policy_loss="opmd", advantage="opmd", kl_loss="k2", entropy_loss="default")
