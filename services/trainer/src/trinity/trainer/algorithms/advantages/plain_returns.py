"""REINFORCE and its simplest baselines."""

import torch

from trinity.plugins import Fraction, advantage, algorithm
from trinity.trainer.algorithms.advantages.rollouts import (
    Advantages,
    Rollouts,
    by_token,
    groups,
    mean_of,
    spread,
    whiten,
)


@advantage("reinforce", source="Williams, 1992")
def reinforce(rollouts: Rollouts) -> Advantages:
    """R."""
    return spread(rollouts, rollouts.returns_N)


@advantage("reinforceplusplus", source="arXiv:2501.03262")
def reinforceplusplus(rollouts: Rollouts, *, gamma: Fraction = 1.0) -> Advantages:
    """Returns to go, whitened over the action tokens of the batch.

    G_t = r_t + gamma G_(t+1), where t + 1 is the next action token; r is the reward at the last, less KL penalties at
    each.
    """
    returns = []
    for index in range(len(rollouts)):
        result = rollouts.token_rewards(index)
        for t in reversed(range(len(result) - 1)):
            result[t] += gamma * result[t + 1]
        returns.append(result)
    return by_token(rollouts, whiten(returns))


@advantage("rloo", source="arXiv:2402.14740")
def rloo(rollouts: Rollouts) -> Advantages:
    """n / (n - 1) (R - mean of the group), which is R minus the mean of the others. A group of one: R."""
    returns = rollouts.returns_N
    scores = returns.clone()
    for members in groups(rollouts.groups_N):
        n = len(members)
        if n > 1:
            scores[members] = n / (n - 1) * (returns[members] - mean_of(returns[members]))
    return spread(rollouts, scores)


@advantage("remax", source="arXiv:2310.10505, algorithm 1", traits=["greedy"])
def remax(rollouts: Rollouts) -> Advantages:
    """R minus the reward of the task's greedy rollout.

    Explorers sample it as the last of the group, with the metric `greedy` (for several, say of a workflow, the mean
    counts). It is not trained. A group without it, as in an archive of another algorithm, has baseline 0.
    """
    returns = rollouts.returns_N
    scores, copies = returns.clone(), torch.ones(len(rollouts), dtype=torch.long)
    for members in groups(rollouts.groups_N):
        greedy = [int(i) for i in members if rollouts.fact(int(i), "greedy")]
        if greedy:
            scores[members] = returns[members] - returns[greedy].mean()
            copies[greedy] = 0
    return spread(rollouts, scores, copies)


algorithm("reinforceplusplus", policy_loss="ppo", advantage="reinforceplusplus", kl_loss="k2", entropy_loss="default")
algorithm("rloo", policy_loss="ppo", advantage="rloo", kl_loss="k2", entropy_loss="default")
algorithm(
    "remax",
    policy_loss="ppo",
    advantage="remax",
    kl_loss="k2",
    entropy_loss="default",
    note="The last rollout of each task is greedy, as the baseline of the others; it is not trained.",
)
