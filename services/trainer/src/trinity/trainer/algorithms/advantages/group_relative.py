"""GRPO: rewards relative to the other rollouts of the same task."""

from typing import Literal

import numpy as np
import torch

from trinity.plugins import Fraction, Positive, advantage, algorithm
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, groups, mean_and_std, spread

StdLevel = Literal["group", "batch", "none"]


def grpo(
    rewards_N: torch.Tensor,
    groups_N: torch.Tensor,
    *,
    epsilon: float = 1e-6,
    std_threshold: float | None = None,
    std_cal_level: str = "group",
    ranked_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Group-relative advantage, [N]: (R - mean of the group) / (sample standard deviation + epsilon).

    DeepSeekMath, arXiv:2402.03300, section 4.1.2. rewards_N float [N]; groups_N int [N], equal for members of a group.
    std_cal_level: the deviation of the `group`, of the whole `batch`, or `none`: not divided (Dr. GRPO,
    arXiv:2503.20783, section 3.2). A group of one has mean 0 and deviation 1; equal rewards give exactly 0. Groups
    of one, or with a deviation <= std_threshold, get 0. ranked_N: rewards for mean and deviation, if different.
    """
    basis = rewards_N if ranked_N is None else ranked_N
    advantages = torch.zeros_like(rewards_N)
    _, batch_std = mean_and_std(basis) if len(basis) else (None, basis)
    left_out = without_spread(basis, groups_N, std_threshold)
    for members in groups(groups_N):
        mean, std = mean_and_std(basis[members])
        difference = rewards_N[members] - mean
        if std_cal_level == "none":
            advantages[members] = difference
        else:
            advantages[members] = difference / ((batch_std if std_cal_level == "batch" else std) + epsilon)
    return advantages.masked_fill(left_out, 0.0)


@advantage("grpo", also=["grpo_verl"], source="DeepSeekMath, arXiv:2402.03300, 4.1.2")
def of_grpo(
    rollouts: Rollouts,
    *,
    epsilon: Positive = 1e-6,
    std_threshold: float | None = None,
    duplicate_experiences: bool = False,
    rank_penalty: Fraction | None = None,
    std_cal_level: StdLevel = "group",
) -> Advantages:
    """(R - mean of the group) / (standard deviation with n - 1, + epsilon).

    Groups that std_threshold leaves out are not trained. duplicate_experiences: as many groups, drawn from the others,
    are trained a second time in their place (Polaris). rank_penalty: see `ranked`; the rewards themselves stay.
    """
    returns, members = rollouts.returns_N, rollouts.groups_N
    basis = returns if rank_penalty is None else ranked(rollouts, rank_penalty)
    scores = grpo(
        returns,
        members,
        epsilon=epsilon,
        std_threshold=std_threshold,
        std_cal_level=std_cal_level,
        ranked_N=basis,
    )
    left_out = without_spread(basis, members, std_threshold)
    copies = (~left_out).long()
    if duplicate_experiences:
        copies = refilled(copies, members, rollouts.seed)
    return spread(rollouts, scores, copies)


def without_spread(rewards_N: torch.Tensor, groups_N: torch.Tensor, threshold: float | None) -> torch.Tensor:
    """True if a sequence's group has one member or a deviation <= threshold, bool [N]; False without a threshold."""
    result = torch.zeros(len(rewards_N), dtype=torch.bool)
    if threshold is not None:
        for members in groups(groups_N):
            _, std = mean_and_std(rewards_N[members])
            result[members] = len(members) == 1 or bool(std <= threshold)
    return result


def ranked(rollouts: Rollouts, penalty: float) -> torch.Tensor:
    """R (1 - penalty * rank / n), [N]: the likelier a rollout was within its group of n, the less it counts.

    Rank 0 has the lowest mean log-probability of its action tokens; a rollout without action tokens comes first. After
    arXiv:2506.02355, where the penalised reward also replaces the reward.
    """
    result = rollouts.returns_N.clone()
    for members in groups(rollouts.groups_N):
        means = [_mean_logprob(rollouts, int(index)) for index in members]
        for rank, place in enumerate(sorted(range(len(means)), key=means.__getitem__)):
            result[members[place]] *= 1 - penalty * rank / len(means)
    return result


def _mean_logprob(rollouts: Rollouts, index: int) -> float:
    chosen = rollouts.logprobs[index][rollouts.masks[index]]
    return float(chosen.mean()) if len(chosen) else -float("inf")


def refilled(copies_N: torch.Tensor, groups_N: torch.Tensor, seed: int) -> torch.Tensor:
    """copies_N plus 1 for the members of as many groups as were left out, drawn with replacement, [N]."""
    result = copies_N.clone()
    all_groups = groups(groups_N)
    kept = [members for members in all_groups if bool(copies_N[members].any())]
    if kept:
        for choice in np.random.default_rng(seed).integers(0, len(kept), len(all_groups) - len(kept)):
            result[kept[choice]] += 1
    return result


algorithm("grpo", also=["grpo_verl"], policy_loss="ppo", advantage="grpo", kl_loss="k2", entropy_loss="default")
algorithm(
    "dr_grpo",
    policy_loss="ppo",
    advantage="grpo",
    repeat_times=8,
    loss_aggregation="seq-mean-token-sum-norm",
    args={"advantage_fn": {"std_cal_level": "none"}},
)
algorithm(
    "dapo",
    policy_loss="ppo",
    advantage="grpo",
    entropy_loss="default",
    repeat_times=16,
    args={"policy_loss_fn": {"clip_range_low": 0.2, "clip_range_high": 0.28}},
    note="Tasks whose rollouts are all right or all wrong are replaced: begin with a model that solves some.",
    operators=(
        {"name": "dapo_dynamic_sampling_filter"},
        {"name": "mask_response_truncated"},
        {"name": "overlong_reward_shaping", "args": {"max_response_length": 32, "cache_length": 6}},
    ),
)
