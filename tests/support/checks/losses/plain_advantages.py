"""Every advantage function as a loop in plain floats, written from its formula, and random batches for them."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trinity.trainer.algorithms.advantages import Rollouts

Tokens = list[list[float]]  # of the action tokens of each sequence


def rollouts_of(seed: int, penalties: bool = False, values: bool = False) -> Rollouts:
    """Groups of trajectories of one to three steps; ragged masks, some empty, some responses without tokens."""
    rng = np.random.default_rng(seed)
    groups, trajectories, steps = [], [], []
    for group in range(int(rng.integers(1, 5))):
        for trajectory in range(int(rng.integers(1, 6))):
            length = int(rng.integers(1, 4))
            groups += [group] * length
            trajectories += [trajectory] * length
            steps += list(range(length))
    order = rng.permutation(len(groups))
    lengths = [int(rng.integers(0, 6)) for _ in groups]
    facts = [
        {
            "step_reward": float(rng.integers(0, 3)),
            "env_state_hash": f"s{rng.integers(3)}",
            "greedy": bool(rng.random() < 0.15),
        }
        for _ in lengths
    ]

    rng_of_trees = np.random.default_rng([seed, 1])
    forks = {(g, t): (int(rng_of_trees.integers(t)), t) for g, t in zip(groups, trajectories, strict=True) if t % 3}
    for place, fact in zip(order, facts, strict=True):
        if (fork := forks.get((groups[place], trajectories[place]))) is not None:
            fact |= {"parent": fork[0], "branch_turn": fork[1]}

    def floats(scale: float) -> list[torch.Tensor]:
        return [torch.tensor(rng.normal(0, scale, length)) for length in lengths]

    return Rollouts(
        rewards_N=torch.tensor(rng.integers(0, 3, len(groups)) * 0.7),
        groups_N=torch.tensor(groups)[order],
        masks=[torch.tensor(rng.random(length) < 0.7) for length in lengths],
        logprobs=[-values.abs() for values in floats(1.0)],
        trajectories_N=torch.tensor(trajectories)[order],
        steps_N=torch.tensor(steps)[order],
        facts=facts,
        penalties=floats(0.1) if penalties else None,
        values=floats(1.0) if values else None,
        teachers=[torch.tensor(-rng.exponential(1.0, length)) for length in lengths],
        seed=seed,
    )


def action_tokens(r: Rollouts, values: Any, index: int) -> list[float]:
    return [float(v) for v, m in zip(values[index], r.masks[index], strict=True) if m]


def returns(r: Rollouts) -> list[float]:
    result = [float(reward) for reward in r.rewards_N]
    if r.penalties is not None:
        result = [value - sum(action_tokens(r, r.penalties, i)) for i, value in enumerate(result)]
    return result


def token_rewards(r: Rollouts, index: int) -> list[float]:
    count = int(r.masks[index].sum())
    rewards = [-p for p in action_tokens(r, r.penalties, index)] if r.penalties is not None else [0.0] * count
    if rewards:
        rewards[-1] += float(r.rewards_N[index])
    return rewards


def members(r: Rollouts, index: int) -> list[int]:
    return [i for i in range(len(r)) if r.groups_N[i] == r.groups_N[index]]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation(values: list[float], ddof: int = 1) -> float:
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - ddof)) if len(values) > 1 else 1.0


def grpo_scores(
    r: Rollouts, epsilon: float = 1e-6, std_cal_level: str = "group", rank_penalty: float | None = None
) -> list[float]:
    raw = returns(r)
    basis = list(raw)
    if rank_penalty is not None:
        for index in range(len(r)):
            likelier = {i: mean(action_tokens(r, r.logprobs, i) or [-math.inf]) for i in members(r, index)}
            rank = sum((likelier[i], i) < (likelier[index], index) for i in likelier)
            basis[index] *= 1 - rank_penalty * rank / len(likelier)
    scores = []
    for index, reward in enumerate(raw):
        group = [basis[i] for i in members(r, index)]
        middle = mean(group) if len(group) > 1 else 0.0
        spread = {"group": deviation(group), "batch": deviation(basis), "none": None}[std_cal_level]
        scores.append((reward - middle) / (1.0 if spread is None else spread + epsilon))
    return scores


def opmd_scores(r: Rollouts, opmd_baseline: str = "mean", tau: float = 1.0) -> list[float]:
    raw, scores = returns(r), []
    for index, reward in enumerate(raw):
        group = [raw[i] for i in members(r, index)]
        baseline = mean(group)
        if opmd_baseline == "logavgexp":
            baseline = tau * math.log(mean([math.exp(value / tau) for value in group]))
        scores.append(reward - (baseline if len(group) > 1 else 0.0))
    return scores


def constant(r: Rollouts, scores: list[float]) -> Tokens:
    return [[score] * int(mask.sum()) for score, mask in zip(scores, r.masks, strict=True)]


def whitened(tokens: Tokens) -> Tokens:
    flat = [value for row in tokens for value in row]
    variance = deviation(flat) ** 2 if len(flat) > 1 else 0.0
    return [[(value - mean(flat)) / math.sqrt(variance + 1e-8) for value in row] for row in tokens]


def of_steps(r: Rollouts, index: int) -> list[int]:
    """The trajectory a sequence is a step of, in order."""
    assert r.trajectories_N is not None
    assert r.steps_N is not None
    steps = r.steps_N
    same = [i for i in members(r, index) if r.trajectories_N[i] == r.trajectories_N[index]]
    return sorted(same, key=lambda i: int(steps[i]))


def step_wise(r: Rollouts, enable_step_norm: bool = False, std_cal_level: str = "group") -> Tokens:
    raw, scores = returns(r), []
    lasts = sorted({of_steps(r, i)[-1] for i in range(len(r))})
    for index in range(len(r)):
        trajectory = of_steps(r, index)
        group = [raw[i] for i in lasts if r.groups_N[i] == r.groups_N[index]]
        spread = {"group": deviation(group), "batch": deviation([raw[i] for i in lasts]), "none": 1 - 1e-6}
        score = (raw[trajectory[-1]] - (mean(group) if len(group) > 1 else 0.0)) / (spread[std_cal_level] + 1e-6)
        scores.append(score / len(trajectory) if enable_step_norm else score)
    return constant(r, scores)


def gigpo(
    r: Rollouts, omega: float = 1.0, gamma: float = 1.0, fnorm: str = "none", state_scope: str = "task"
) -> Tokens:
    def relative(value: float, among: list[float]) -> float:
        middle = mean(among) if len(among) > 1 else 0.0
        return (value - middle) / ((deviation(among) if fnorm == "std" else 1.0) + 1e-6)

    assert r.facts is not None
    step_rewards = [float(fact["step_reward"]) for fact in r.facts]
    if r.penalties is not None:
        step_rewards = [reward - sum(action_tokens(r, r.penalties, i)) for i, reward in enumerate(step_rewards)]
    episode = [sum(step_rewards[i] for i in of_steps(r, index)) for index in range(len(r))]
    to_go = []
    for index in range(len(r)):
        rest = of_steps(r, index)[of_steps(r, index).index(index) :]
        to_go.append(sum(gamma**k * step_rewards[i] for k, i in enumerate(rest)))
    scores = []
    for index in range(len(r)):
        heads = [i for i in members(r, index) if of_steps(r, i)[0] == i]
        score = relative(episode[index], [episode[i] for i in heads])
        state = r.facts[index]["env_state_hash"]
        where = range(len(r)) if state_scope == "batch" else members(r, index)
        same = [to_go[i] for i in where if r.facts[i]["env_state_hash"] == state]
        scores.append(score + (omega * relative(to_go[index], same) if len(same) > 1 else 0.0))
    return constant(r, scores)


def gae(r: Rollouts, gamma: float = 1.0, lam: float = 1.0) -> Tokens:
    result = []
    for index in range(len(r)):
        rewards = token_rewards(r, index)
        value = action_tokens(r, r.values, index) if r.values is not None else [0.0] * len(rewards)
        deltas = [
            reward + gamma * (value[t + 1] if t + 1 < len(value) else 0.0) - value[t]
            for t, reward in enumerate(rewards)
        ]
        result.append([sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))])
    return whitened(result)


def returns_to_go(r: Rollouts, gamma: float = 1.0) -> Tokens:
    rewards = [token_rewards(r, index) for index in range(len(r))]
    return whitened([[sum(gamma**k * v for k, v in enumerate(row[t:])) for t in range(len(row))] for row in rewards])


def rloo(r: Rollouts) -> Tokens:
    raw, scores = returns(r), []
    for index, reward in enumerate(raw):
        others = [raw[i] for i in members(r, index) if i != index]
        scores.append(reward - mean(others) if others else reward)
    return constant(r, scores)


def remax(r: Rollouts) -> Tokens:
    raw, scores = returns(r), []
    assert r.facts is not None
    for index, reward in enumerate(raw):
        greedy = [raw[i] for i in members(r, index) if r.facts[i]["greedy"]]
        scores.append(reward - (mean(greedy) if greedy else 0.0))
    return constant(r, scores)


def opmd_reweighted(r: Rollouts, alpha: float = 3.0, best: float = 1.0, **args: Any) -> Tokens:
    scores = zip(opmd_scores(r, **args), r.rewards_N, strict=True)
    return constant(r, [best if reward >= 1 else alpha * s if s >= 0 else s for s, reward in scores])


def grpo_reweighted(r: Rollouts, alpha: float = 3.0, best: float = 1.0, **args: Any) -> Tokens:
    scores = zip(grpo_scores(r, **args), r.rewards_N, strict=True)
    return constant(r, [best if reward >= 1 else alpha * s if s >= 0 else s for s, reward in scores])


def asymre(r: Rollouts, baseline_shift: float = -0.1) -> Tokens:
    raw, scores = returns(r), []
    for index, reward in enumerate(raw):
        group = [raw[i] for i in members(r, index)]
        scores.append(reward - (mean(group) + baseline_shift) if len(group) > 1 else reward)
    return constant(r, scores)


def tree(r: Rollouts) -> Tokens:
    assert r.trajectories_N is not None and r.steps_N is not None and r.facts is not None
    sequences = [(int(g), int(t), int(s)) for g, t, s in zip(r.groups_N, r.trajectories_N, r.steps_N, strict=True)]

    def origin(group: int, rollout: int) -> tuple[int | None, int]:
        fact = r.facts[next(i for i, (g, t, _) in enumerate(sequences) if (g, t) == (group, rollout))]  # type: ignore[index]
        return fact.get("parent"), fact.get("branch_turn", 0)

    def owner(group: int, rollout: int, turn: int) -> int:
        """The rollout that trains this turn of a rollout."""
        parent, first = origin(group, rollout)
        return rollout if parent is None or turn >= first else owner(group, parent, turn)

    def path_return(group: int, rollout: int) -> float:
        own = [i for i, (g, t, _) in enumerate(sequences) if (g, t) == (group, rollout)]
        last = max(own, key=lambda i: sequences[i][2])
        result = float(r.rewards_N[last])
        for index, (g, t, turn) in enumerate(sequences):
            if r.penalties is not None and g == group and owner(group, rollout, turn) == t:
                result -= sum(action_tokens(r, r.penalties, index))
        return result

    def value(group: int, rollout: int, turn: int) -> float:
        """Mean return of the rollouts through a turn that `rollout` trains."""
        rollouts = sorted({t for g, t, _ in sequences if g == group})
        return mean([path_return(group, one) for one in rollouts if owner(group, one, turn) == rollout])

    scores = []
    for group, rollout, turn in sequences:
        rollouts = sorted({t for g, t, _ in sequences if g == group})
        begins = [origin(group, rollout)[1]]
        if turn < begins[0]:
            scores.append(0.0)
            continue
        begins += [origin(group, t)[1] for t in rollouts if origin(group, t)[0] == rollout]
        first = max(begin for begin in begins if begin <= turn)
        at = (origin(group, rollout)[0] if first == begins[0] else rollout, first)
        siblings = [t for t in rollouts if origin(group, t) == at or (t == at[0])]
        scores.append(value(group, rollout, first) - mean([value(group, one, first) for one in siblings]))
    return constant(r, scores)


def rec(r: Rollouts, std_normalize: bool = False) -> Tokens:
    raw, scores = returns(r), []
    for index, reward in enumerate(raw):
        group = [raw[i] for i in members(r, index)]
        score = reward - (mean(group) if len(group) > 1 else 0.0)
        scores.append(score / (deviation(group, ddof=0) + 1e-6) if std_normalize else score)
    return constant(r, scores)


def teacher(r: Rollouts, index: int) -> list[tuple[float, float]]:
    return list(zip(action_tokens(r, r.teachers, index), action_tokens(r, r.logprobs, index), strict=True))


def distill(r: Rollouts, kl_coef: float = 1.0) -> Tokens:
    return [[kl_coef * (t - s) for t, s in teacher(r, index)] for index in range(len(r))]


def jsd(r: Rollouts, kl_coef: float = 1.0, lambda_coef: float = 0.5, temperature: float = 1.0) -> Tokens:
    b = lambda_coef

    def term(t: float, s: float) -> float:
        if b == 0:
            return math.exp(t - s) - 1
        return t - s if b == 1 else -(1 - b) * (s - math.log(b * math.exp(t) + (1 - b) * math.exp(s)))

    pairs = [[(t / temperature, s / temperature) for t, s in teacher(r, index)] for index in range(len(r))]
    return [[kl_coef * term(t, s) for t, s in row] for row in pairs]


# name -> reference, and arguments to test in addition to the defaults
Reference = tuple[Callable[..., Tokens], list[dict[str, Any]]]
LEVELS: list[dict[str, Any]] = [{"std_cal_level": "batch"}, {"std_cal_level": "none"}, {"epsilon": 0.5}]
GRPO: Reference = (lambda r, **a: constant(r, grpo_scores(r, **a)), [*LEVELS, {"rank_penalty": 0.4}])
BASELINES: list[dict[str, Any]] = [{"opmd_baseline": "logavgexp"}, {"opmd_baseline": "logavgexp", "tau": 0.3}]
OPMD: Reference = (lambda r, **a: constant(r, opmd_scores(r, **a)), BASELINES)
ASYMRE: Reference = (asymre, [{"baseline_shift": 0.2}])
GIGPO_ARGS: list[dict[str, Any]] = [{"omega": 0.3, "gamma": 0.9}, {"fnorm": "std"}, {"state_scope": "batch"}]
REFERENCES: dict[str, Reference] = {
    "grpo": GRPO,
    "grpo_reweight_adv": (grpo_reweighted, [{"alpha": 2.0}, {"std_cal_level": "batch"}]),
    "step_wise_grpo": (step_wise, [{"enable_step_norm": True}, {"std_cal_level": "batch"}, {"std_cal_level": "none"}]),
    "gigpo": (gigpo, GIGPO_ARGS),
    "tree": (tree, []),
    "ppo": (gae, [{"gamma": 0.9}, {"gamma": 0.95, "lam": 0.8}, {"lam": 0.0}]),
    "reinforceplusplus": (returns_to_go, [{"gamma": 0.9}]),
    "reinforce": (lambda r: constant(r, returns(r)), []),
    "remax": (remax, []),
    "rloo": (rloo, []),
    "opmd": OPMD,
    "opmd_reweight_adv": (opmd_reweighted, [*BASELINES, {"alpha": 1.5, "best": 1.5}]),
    "asymre": ASYMRE,
    "rec": (rec, [{"std_normalize": True}]),
    "on_policy_distill": (distill, [{"kl_coef": 0.2}]),
    "jsd": (
        jsd,
        [{"lambda_coef": 0.1, "kl_coef": 2.0}, {"lambda_coef": 0}, {"lambda_coef": 1, "temperature": 2.0}],
    ),
}
