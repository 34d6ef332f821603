"""GRPO over trajectories of several steps, each step a sequence of its own."""

import torch

from trinity.trainer.algorithms.advantages.group_relative import grpo, without_spread
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, spread


def step_wise_grpo(
    rollouts: Rollouts,
    *,
    epsilon: float = 1e-6,
    enable_step_norm: bool = False,
    std_threshold: float | None = None,
    std_cal_level: str = "group",
) -> Advantages:
    """GRPO's advantage of the last step of each trajectory, among those of its task, for all of its steps.

    arXiv:2402.03300, section 4.1.2, with a trajectory for a response. enable_step_norm: divided by the number of steps,
    so that long trajectories count no more than short ones. Tasks with one trajectory, or a deviation <= std_threshold,
    are not trained if there is a threshold.
    """
    trajectories = rollouts.trajectories()
    last = torch.tensor([steps[-1] for steps in trajectories], dtype=torch.long)
    rewards, groups = rollouts.returns_N[last], rollouts.groups_N[last]
    chosen = grpo(rewards, groups, epsilon=epsilon, std_threshold=std_threshold, std_cal_level=std_cal_level)
    left_out = without_spread(rewards, groups, std_threshold)
    scores = torch.zeros_like(rollouts.rewards_N)
    copies = torch.ones(len(rollouts), dtype=torch.long)
    for steps, score, dropped in zip(trajectories, chosen, left_out, strict=True):
        scores[steps] = score / len(steps) if enable_step_norm else score
        copies[steps] = int(not dropped)
    return spread(rollouts, scores, copies)
