"""Advantages of veRL, TRL, Trinity-RFT and R3L, to be compared with ours: recorded ones, and loops in plain floats.

The loops were written from veRL 0.9.1 (verl/trainer/ppo/core_algos.py), TRL of 2026-07-24
(trl/trainer/grpo_trainer.py) and 1.16 (rloo), Trinity-RFT 0.6.0 (trinity/algorithm/advantage_fn), R3L of 2026-04-06.
Functions of plain_advantages only read the inputs; all formulas are written here.
"""

import math
import statistics
from collections.abc import Callable, Iterator

from support.checks.losses.peer_algorithms import Peer
from support.checks.losses.plain_advantages import (
    Tokens,
    constant,
    deviation,
    mean,
    members,
    returns,
    teacher,
    token_rewards,
    whitened,
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


def jsd(r: Rollouts) -> Tokens:
    def term(t: float, s: float) -> float:
        m = math.log(0.5 * math.exp(t) + 0.5 * math.exp(s))
        return -(0.5 * (t - m) + 0.5 * (s - m))

    return [[term(t, s) for t, s in teacher(r, index)] for index in range(len(r))]


def in_places(r: Rollouts, index: int) -> tuple[list[bool], list[float]]:
    """(is an action, reward) of every token of a response, observations included."""
    rewards = iter(token_rewards(r, index))
    mask = [bool(flag) for flag in r.masks[index]]
    return mask, [next(rewards) if flag else 0.0 for flag in mask]


def gae(r: Rollouts) -> Tokens:
    """With gamma and lam of 1, over observations too."""
    found = []
    for index in range(len(r)):
        mask, rewards = in_places(r, index)
        values = [0.0] * len(mask) if r.values is None else [float(value) for value in r.values[index]]
        after, total, row = 0.0, 0.0, []
        for t in reversed(range(len(mask))):
            total, after = rewards[t] + after - values[t] + total, values[t]
            row.append(total)
        found.append([value for value, flag in zip(row[::-1], mask, strict=True) if flag])
    return whitened(found)


def to_go(r: Rollouts) -> Tokens:
    found = []
    for index in range(len(r)):
        mask, rewards = in_places(r, index)
        total, row = 0.0, []
        for t in reversed(range(len(mask))):
            total += rewards[t]
            row.append(total)
        found.append([value for value, flag in zip(row[::-1], mask, strict=True) if flag])
    return whitened(found)


def runs(r: Rollouts) -> Iterator[dict[int, list[int]]]:
    """Task -> run -> its steps, in order."""
    assert r.trajectories_N is not None
    assert r.steps_N is not None
    found: dict[int, dict[int, list[int]]] = {}
    for index in sorted(range(len(r)), key=r.steps_N.tolist().__getitem__):
        task, run = int(r.groups_N[index]), int(r.trajectories_N[index])
        found.setdefault(task, {}).setdefault(run, []).append(index)
    yield from found.values()


def standing(values: list[float]) -> tuple[float, float]:
    """Centre and spread. 0 and 1 for a single value."""
    return (statistics.mean(values), statistics.stdev(values)) if len(values) > 1 else (0.0, 1.0)


def asymre(r: Rollouts) -> Tokens:
    """The baseline of a task is 0.1 below its mean."""
    tasks: dict[int, list[float]] = {}
    for task, reward in zip(r.groups_N.tolist(), r.rewards_N.tolist(), strict=True):
        tasks.setdefault(task, []).append(reward)
    below = {task: statistics.mean(found) - 0.1 if len(found) > 1 else 0.0 for task, found in tasks.items()}
    return constant(r, [float(r.rewards_N[i]) - below[int(r.groups_N[i])] for i in range(len(r))])


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


def step_wise(r: Rollouts) -> Tokens:
    """The last steps of a task's runs against each other; the steps before have the same."""
    scores = [0.0] * len(r)
    for task in runs(r):
        last = {run: float(r.rewards_N[steps[-1]]) for run, steps in task.items()}
        centre, spread = standing(list(last.values()))
        for run, steps in task.items():
            for index in steps:
                scores[index] = (last[run] - centre) / (spread + 1e-6)
    return constant(r, scores)


def gigpo(r: Rollouts) -> Tokens:
    """Episodes of a task against each other, and steps against those in the same state, of all tasks."""
    assert r.facts is not None
    rewards = [float(fact["step_reward"]) for fact in r.facts]
    scores, to_go = [0.0] * len(r), [0.0] * len(r)
    for task in runs(r):
        totals = {run: math.fsum(rewards[index] for index in steps) for run, steps in task.items()}
        centre, _ = standing(list(totals.values()))
        for run, steps in task.items():
            left = 0.0
            for index in reversed(steps):
                left += rewards[index]
                to_go[index], scores[index] = left, (totals[run] - centre) / (1 + 1e-6)
    states: dict[str, list[int]] = {}
    for index, fact in enumerate(r.facts):
        states.setdefault(fact["env_state_hash"], []).append(index)
    for same in states.values():
        centre, _ = standing([to_go[index] for index in same])
        for index in same if len(same) > 1 else []:
            scores[index] += (to_go[index] - centre) / (1 + 1e-6)
    return constant(r, scores)


ADVANTAGES = (
    Peer("ppo", "veRL", "verl/advantage ppo"),
    Peer("ppo", "Trinity-RFT", gae, why="over observations too there: the same with `gamma` and `lam` of 1"),
    Peer("reinforceplusplus", "veRL", "verl/advantage reinforceplusplus"),
    Peer("reinforceplusplus", "Trinity-RFT", to_go),
    Peer("reinforce", "Trinity-RFT", lambda r: constant(r, returns(r))),
    *(
        Peer("remax", whose, remax, why="from a rollout beside the group there, of `repeat_times` here")
        for whose in ("veRL", "Trinity-RFT")
    ),
    Peer("opmd", "Trinity-RFT", lambda r: constant(r, group_scores(r, 0, False))),
    Peer("asymre", "Trinity-RFT", asymre),
    Peer("rec", "Trinity-RFT", lambda r: constant(r, group_scores(r, 0, False)), why="fails in a group of one there"),
    Peer("step_wise_grpo", "Trinity-RFT", step_wise),
    Peer(
        "gigpo",
        "Trinity-RFT",
        gigpo,
        {"state_scope": "batch"},
        why="compares steps of all tasks there, of one in the paper",
    ),
    Peer("rloo", "TRL", rloo),
    Peer("grpo", "veRL", "verl/advantage grpo"),
    Peer("grpo", "veRL, norm_adv_by_std_in_grpo off", centred, {"std_cal_level": "none"}),
    Peer("grpo", "TRL", grpo(1e-4), {"epsilon": 1e-4}, why="1e-4 there"),
    Peer("grpo", "Trinity-RFT", grpo(1e-6)),
    Peer("rloo", "veRL", "verl/advantage rloo"),
    Peer("rloo", "Trinity-RFT", rloo),
    Peer(
        "opmd_reweight_adv",
        "R3L",
        lambda r: amplified(r, group_scores(r, 0, False), 1.0),
        why="its documentation gives R = R_max the advantage alpha, its code 1; `best: 3` is the documentation's",
    ),
    Peer("grpo_reweight_adv", "R3L", lambda r: amplified(r, group_scores(r, 1e-6), 1.0), why="as `opmd_reweight_adv`"),
    Peer("on_policy_distill", "Trinity-RFT", lambda r: [[t - s for t, s in teacher(r, i)] for i in range(len(r))]),
    Peer(
        "jsd",
        "Trinity-RFT",
        jsd,
        why="the divergence's terms there, which are not minus its gradient; `lambda_coef` 0 and 1 "
        "stand for the other KL there than in GKD and TRL",
    ),
)
