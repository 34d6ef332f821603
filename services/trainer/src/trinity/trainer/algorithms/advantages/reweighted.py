"""R3L's positive amplification: rollouts that are better than their group count `alpha` times. arXiv:2601.03715.

Rollouts with R >= 1, the maximum, have the advantage `best`: 1 in R3L's code (github.com/shiweijiezero/R3L),
alpha in its documentation.
"""

import torch

from trinity.plugins import NonNegative, Positive, advantage, algorithm
from trinity.trainer.algorithms.advantages.group_relative import StdLevel, grpo
from trinity.trainer.algorithms.advantages.mirror_descent import Baseline, opmd_scores
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, spread


@advantage("opmd_reweight_adv", source="R3L, arXiv:2601.03715")
def opmd_reweight_adv(
    rollouts: Rollouts,
    *,
    opmd_baseline: Baseline = "mean",
    tau: NonNegative = 1.0,
    alpha: NonNegative = 3.0,
    best: float = 1.0,
) -> Advantages:
    """OPMD's R - b, times alpha if it is >= 0; `best` if R >= 1."""
    scores = opmd_scores(rollouts.returns_N, rollouts.groups_N, opmd_baseline, tau)
    return _amplified(rollouts, scores, alpha, best)


@advantage("grpo_reweight_adv", source="R3L, arXiv:2601.03715")
def grpo_reweight_adv(
    rollouts: Rollouts,
    *,
    epsilon: Positive = 1e-6,
    std_cal_level: StdLevel = "group",
    alpha: NonNegative = 3.0,
    best: float = 1.0,
) -> Advantages:
    """GRPO's advantage, times alpha if it is >= 0; `best` if R >= 1."""
    scores = grpo(rollouts.returns_N, rollouts.groups_N, epsilon=epsilon, std_cal_level=std_cal_level)
    return _amplified(rollouts, scores, alpha, best)


def _amplified(rollouts: Rollouts, scores_N: torch.Tensor, alpha: float, best: float) -> Advantages:
    amplified = torch.where(scores_N >= 0, alpha * scores_N, scores_N)
    return spread(rollouts, torch.where(rollouts.rewards_N >= 1, torch.full_like(scores_N, best), amplified))


algorithm("opmd_reweight_adv", policy_loss="opmd", advantage="opmd_reweight_adv", kl_loss="k2", entropy_loss="default")
algorithm("grpo_reweight_adv", policy_loss="ppo", advantage="grpo_reweight_adv", kl_loss="k2", entropy_loss="default")
