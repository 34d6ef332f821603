"""GRPO over trajectories of several steps, where each step is a sequence."""

import torch

from trinity.plugins import Positive, advantage, algorithm
from trinity.trainer.algorithms.advantages.group_relative import StdLevel, grpo, without_spread
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, spread


@advantage("step_wise_grpo", source="as grpo")
def step_wise_grpo(
    rollouts: Rollouts,
    *,
    epsilon: Positive = 1e-6,
    enable_step_norm: bool = False,
    std_threshold: float | None = None,
    std_cal_level: StdLevel = "group",
) -> Advantages:
    """GRPO's advantage of the last step of each trajectory, within its task, for all of its steps.

    enable_step_norm: divided by the number of steps, so that long trajectories count no more than short ones. With a
    std_threshold, tasks with one trajectory or a deviation <= std_threshold are not trained.
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


algorithm(
    "multi_step_grpo",
    policy_loss="ppo",
    advantage="step_wise_grpo",
    kl_loss="k2",
    entropy_loss="default",
    repeat_times=8,
    note="Meant for episodes of several steps.",
)
