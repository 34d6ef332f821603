"""Generalized advantage estimation, with a critic's values."""

import torch

from trinity.plugins import Fraction, advantage, algorithm
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, by_token, whiten


@advantage("ppo", source="GAE, arXiv:1506.02438, eq. 16", traits=["critic"])
def ppo(rollouts: Rollouts, *, gamma: Fraction = 1.0, lam: Fraction = 1.0) -> Advantages:
    """GAE over the action tokens of a sequence, whitened over those of the batch.

    delta_t = r_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lam A_(t+1), where t + 1 is the next action token and
    V is 0 after the last. r is the reward at the last action token, less KL penalties at each. returns = A + V, before
    A is whitened. Without a critic V is 0; a sequence without action tokens has none.
    """
    advantages, returns = [], []
    for index in range(len(rollouts)):
        rewards = rollouts.token_rewards(index)
        values = torch.zeros_like(rewards)
        if rollouts.values is not None:
            values = rollouts.values[index][rollouts.masks[index]].to(torch.float64)
        result = torch.zeros_like(rewards)
        later, after = 0.0, 0.0
        for t in reversed(range(len(rewards))):
            delta = float(rewards[t]) + gamma * after - float(values[t])
            later = delta + gamma * lam * later
            after = float(values[t])
            result[t] = later
        advantages.append(result)
        returns.append(result + values)
    return by_token(rollouts, whiten(advantages), returns)


algorithm(
    "ppo",
    policy_loss="ppo",
    advantage="ppo",
    kl_loss="k2",
    entropy_loss="default",
    repeat_times=1,
    critic=True,
    note="Learns a critic and the policy.",
)
