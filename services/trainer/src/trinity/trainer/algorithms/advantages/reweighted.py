"""R3L's positive amplification: rollouts that are better than their group count `alpha` times. arXiv:2601.03715."""

import torch

from trinity.trainer.algorithms.advantages.group_relative import grpo
from trinity.trainer.algorithms.advantages.mirror_descent import opmd_scores
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, spread


def opmd_reweight_adv(
    rollouts: Rollouts, *, opmd_baseline: str = "mean", tau: float = 1.0, alpha: float = 3.0
) -> Advantages:
    """s = R - b as in opmd; 1 if R >= 1; times alpha if it is >= 0 then."""
    scores = opmd_scores(rollouts.returns_N, rollouts.groups_N, opmd_baseline, tau)
    scores = torch.where(rollouts.rewards_N >= 1, torch.ones_like(scores), scores)
    return spread(rollouts, torch.where(scores >= 0, alpha * scores, scores))


def grpo_reweight_adv(
    rollouts: Rollouts, *, epsilon: float = 1e-6, std_cal_level: str = "group", alpha: float = 3.0
) -> Advantages:
    """GRPO's advantage; exactly 1 if R >= 1, else times alpha if it is >= 0."""
    scores = grpo(rollouts.returns_N, rollouts.groups_N, epsilon=epsilon, std_cal_level=std_cal_level)
    amplified = torch.where(scores >= 0, alpha * scores, scores)
    return spread(rollouts, torch.where(rollouts.rewards_N >= 1, torch.ones_like(scores), amplified))
