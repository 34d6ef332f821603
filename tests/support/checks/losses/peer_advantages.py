"""Advantages of veRL, TRL, Trinity-RFT and R3L, to be compared with ours: recorded ones, and loops in plain floats.

The loops were written from veRL 0.9.1 (verl/trainer/ppo/core_algos.py), TRL of 2026-07-24
(trl/trainer/grpo_trainer.py) and 1.16 (rloo), R3L of 2026-04-06.
Functions of plain_advantages only read the inputs; all formulas are written here.
"""

import statistics
from collections.abc import Callable

from support.checks.losses.peer_algorithms import Peer
from support.checks.losses.plain_advantages import (
    Tokens,
    constant,
    deviation,
    mean,
    members,
    returns,
    token_rewards,
)  # fmt: skip
from trinity.trainer.algorithms.advantages import Rollouts


def group_scores(r: Rollouts, epsilon: float, divide: bool = True) -> list[float]:
    raw, scores = returns(r), []
    for index, reward in enumerate(raw):
        group = [raw[i] for i in members(r, index)]
        middle = mean(group) if len(group) > 1 else 0.0
        scores.append((reward - middle) / (deviation(group) + epsilon if divide else 1.0))
    return scores


def grpo(epsilon: float) -> Callable[[Rollouts], Tokens]:
    return lambda r: constant(r, group_scores(r, epsilon))


def centred(r: Rollouts) -> Tokens:
    return constant(r, group_scores(r, 0, divide=False))


def amplified(r: Rollouts, scores: list[float], best: float) -> Tokens:
    rewards = [float(reward) for reward in r.rewards_N]
    return constant(r, [best if R >= 1 else 3 * s if s >= 0 else s for R, s in zip(rewards, scores, strict=True)])


def rloo(r: Rollouts) -> Tokens:
    raw = returns(r)
    sizes = [len(members(r, index)) for index in range(len(r))]
    means = [mean([raw[i] for i in members(r, index)]) for index in range(len(r))]
    scores = [n / (n - 1) * (R - m) if n > 1 else R for n, R, m in zip(sizes, raw, means, strict=True)]
    return constant(r, scores)


def in_places(r: Rollouts, index: int) -> tuple[list[bool], list[float]]:
    """(is an action, reward) of every token of a response, observations included."""
    rewards = iter(token_rewards(r, index))
    mask = [bool(flag) for flag in r.masks[index]]
    return mask, [next(rewards) if flag else 0.0 for flag in mask]


def remax(r: Rollouts) -> list[list[float] | None]:
    """Reward to go at each token, minus the reward of the greedy rollout, which their batches do not have."""
    assert r.facts is not None
    greedy: dict[int, list[float]] = {}
    for task, reward, fact in zip(r.groups_N.tolist(), r.rewards_N.tolist(), r.facts, strict=True):
        if fact["greedy"]:
            greedy.setdefault(task, []).append(reward)
    found: list[list[float] | None] = []
    for index, fact in enumerate(r.facts):
        mask, rewards = in_places(r, index)
        baseline, total, row = statistics.mean(greedy.get(int(r.groups_N[index]), [0.0])), 0.0, []
        for t in reversed(range(len(mask))):
            total += rewards[t] * mask[t]
            row.append(total - baseline)
        tokens = [value for value, flag in zip(row[::-1], mask, strict=True) if flag]
        found.append(None if fact["greedy"] else tokens)
    return found


ADVANTAGES = (
    Peer("ppo", "veRL", "verl/advantage ppo"),
    Peer(
        "ppo",
        "Trinity-RFT",
        "trinity-rft/advantage ppo",
        why="over observations too there: the same with `gamma` and `lam` of 1",
    ),
    Peer("reinforceplusplus", "veRL", "verl/advantage reinforceplusplus"),
    Peer("reinforceplusplus", "Trinity-RFT", "trinity-rft/advantage reinforceplusplus"),
    Peer("reinforce", "Trinity-RFT", "trinity-rft/advantage reinforce"),
    *(
        Peer("remax", whose, theirs, why="from a rollout beside the group there, of `repeat_times` here")
        for whose, theirs in (("veRL", remax), ("Trinity-RFT", "trinity-rft/advantage remax"))
    ),
    Peer("opmd", "Trinity-RFT", "trinity-rft/advantage opmd"),
    Peer("asymre", "Trinity-RFT", "trinity-rft/advantage asymre"),
    Peer("rec", "Trinity-RFT", "trinity-rft/advantage rec", why="fails in a group of one there"),
    Peer("step_wise_grpo", "Trinity-RFT", "trinity-rft/advantage step_wise_grpo"),
    Peer(
        "gigpo",
        "Trinity-RFT",
        "trinity-rft/advantage gigpo",
        {"state_scope": "batch"},
        why="compares steps of all tasks there, of one in the paper",
    ),
    Peer("rloo", "TRL", rloo),
    Peer("grpo", "veRL", "verl/advantage grpo"),
    Peer("grpo", "veRL, norm_adv_by_std_in_grpo off", centred, {"std_cal_level": "none"}),
    Peer("grpo", "TRL", grpo(1e-4), {"epsilon": 1e-4}, why="1e-4 there"),
    Peer("grpo", "Trinity-RFT", "trinity-rft/advantage grpo"),
    Peer("rloo", "veRL", "verl/advantage rloo"),
    Peer("rloo", "Trinity-RFT", "trinity-rft/advantage rloo"),
    Peer(
        "opmd_reweight_adv",
        "R3L",
        lambda r: amplified(r, group_scores(r, 0, False), 1.0),
        why="its documentation gives R = R_max the advantage alpha, its code 1; `best: 3` is the documentation's",
    ),
    Peer("grpo_reweight_adv", "R3L", lambda r: amplified(r, group_scores(r, 1e-6), 1.0), why="as `opmd_reweight_adv`"),
    Peer("on_policy_distill", "Trinity-RFT", "trinity-rft/advantage on_policy_distill"),
    Peer(
        "jsd",
        "Trinity-RFT",
        "trinity-rft/advantage jsd",
        why="the divergence's terms there, which are not minus its gradient; `lambda_coef` 0 and 1 "
        "stand for the other KL there than in GKD and TRL",
    ),
)
