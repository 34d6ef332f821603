"""What veRL, TRL, Trinity-RFT, R3L and M2PO's authors compute, as loops in plain floats, to be compared with ours.

Read in: veRL of 2026-01-29 (verl/trainer/ppo/core_algos.py), TRL of 2026-07-24 (trl/trainer/grpo_trainer.py,
trl/experimental/gkd), Trinity-RFT 0.6.0 (trinity/algorithm), R3L of 2026-04-06, Infini-AI-Lab/M2PO.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.losses.loss_cases import Case, Reference, Rows
from support.losses.plain_advantages import Tokens, constant, deviation, mean, members, returns, teacher
from support.losses.plain_losses import by_token, clip
from trinity.trainer.algorithms.advantages import Rollouts


@dataclass(frozen=True)
class Peer:
    """`theirs`, with their defaults; `settings` of ours that come nearest; `why` ours are others."""

    name: str
    whose: str
    theirs: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "token-mean"
    why: str = ""


def ppo(low: float = 0.2, high: float = 0.2, dual: float = math.inf) -> Reference:
    def loss(lp: float, sg: float, lo: float, a: float, gap: float) -> float:
        r = math.exp(lp - lo)
        clipped = max(-a * r, -a * clip(r, 1 - low, 1 + high))
        return min(clipped, -a * dual) if a < 0 else clipped

    return by_token(loss)


def of_sequences(low: float, high: float) -> Reference:
    def loss(lp: float, sg: float, lo: float, a: float, gap: float) -> float:
        s = math.exp(min(lp - sg + gap, 10))
        return max(-a * s, -a * clip(s, 1 - low, 1 + high))

    return by_token(loss)


def cispo(low: float, high: float) -> Reference:
    return by_token(lambda lp, sg, lo, a, gap: -clip(math.exp(sg - lo), low, high) * a * lp)


def gate(r: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return 4 / tau / (1 + math.exp(-tau * (r - 1)))


SAPO = by_token(lambda lp, sg, lo, a, gap: -a * gate(math.exp(lp - lo), a))
GATED = by_token(lambda lp, sg, lo, a, gap: -a * gate(math.exp(sg - lo), a) * lp)


def geo_mean(case: Case, lp: Rows, sg: Rows) -> float:
    """Of log-ratios clipped at 0.2; the mean is over sequences with tokens."""
    total, count = 0.0, 0
    for row, old, advantages in zip(lp, case.rows("old_logprobs"), case.rows("advantages"), strict=True):
        if row:
            signs = [math.copysign(1, a) for a in advantages]
            gaps = [v - o for v, o in zip(row, old, strict=True)]
            inside = [s * min(s * d, s * clip(d, -0.2, 0.2)) for s, d in zip(signs, gaps, strict=True)]
            total -= sum(advantages) / len(row) * math.exp(sum(inside) / len(row))
            count += 1
    return total / max(count, 1)


def m2po(case: Case, lp: Rows, sg: Rows) -> float:
    """One clip for the batch, as far out as a mean of capped squares of 0.04 allows; its constant is in the value."""
    old, advantages = case.rows("old_logprobs"), case.rows("advantages")
    pairs = zip(sg, old, advantages, strict=True)
    gaps = [(v - o, a) for rows in pairs for v, o, a in zip(*rows, strict=True)]
    squares = sorted(gap**2 for gap, a in gaps if gap * a > 0)
    inside = [cap for cap in squares if sum(min(square, cap) for square in squares) <= 0.04 * len(squares)]
    within = max(inside, default=0.0)
    beyond = min((square for square in squares if square > within), default=within + 1)
    bound = math.sqrt((within + beyond) / 2)  # between two tokens, where it says the same as at the first
    low, high = math.exp(-bound), math.exp(bound)

    def loss(v: float, s: float, lo: float, a: float, gap: float) -> float:
        return max(-a * math.exp(v - lo), -a * clip(math.exp(v - lo), low, high))

    return by_token(loss, "token-mean")(case, lp, sg)


LOSSES = (
    Peer("ppo", "veRL", ppo(dual=3.0)),
    Peer("ppo", "TRL", ppo(), {"clip_ratio_c": 1e9}, why="no dual clip there; here no extreme token decides a step"),
    Peer("ppo", "Trinity-RFT", ppo(dual=3.0)),
    Peer(
        "gspo",
        "veRL",
        of_sequences(0.2, 0.2),
        {"clip_range": 0.2, "clip_range_low": None, "clip_range_high": None},
        "seq-mean-token-mean",
        "clips at 0.2 there; the paper's are 0.0003 and 0.0004",
    ),
    Peer("gspo", "Trinity-RFT", of_sequences(3e-4, 4e-4), mode="seq-mean-token-mean"),
    Peer(
        "cispo",
        "veRL",
        cispo(0.8, 1.2),
        {"clip_range_low": 0.2, "clip_range_high": 0.2},
        why="clips at 0.2 there; the paper has no lower bound",
    ),
    Peer(
        "cispo",
        "TRL",
        cispo(0.0, 5.0),
        {"clip_range_high": 4.0},
        why="`epsilon_high` is the bound there, 5.0 as advised",
    ),
    Peer("cispo", "Trinity-RFT", cispo(0.0, 1.28)),
    Peer("sapo", "veRL", SAPO, mode="seq-mean-token-mean"),
    Peer("sapo", "TRL", SAPO, mode="seq-mean-token-mean"),
    Peer(
        "sapo",
        "Trinity-RFT",
        GATED,
        why="multiplies lp by the gate, which is no gradient of the paper's objective, and twice as much at r = 1; "
        "`token-mean` there, sequences' means in the paper",
    ),
    Peer(
        "gmpo",
        "veRL",
        geo_mean,
        {"clip_range_low": 0.2, "clip_range_high": 0.2},
        "seq-mean-token-sum",
        "clips at 0.2 there; the paper's are 0.4",
    ),
    Peer(
        "topr",
        "Trinity-RFT",
        by_token(lambda lp, sg, lo, a, gap: -(clip(math.exp(sg - lo), 0, 1) if a <= 0 else 1.0) * a * lp),
    ),
    Peer(
        "sppo",
        "Trinity-RFT",
        by_token(lambda lp, sg, lo, a, gap: -a * (lp - lo) if 1 / 1.3 <= math.exp(sg - lo) <= 1.3 else 0.0),
    ),
    Peer("opmd", "Trinity-RFT", by_token(lambda lp, sg, lo, a, gap: -a * lp / 2)),
    Peer("opmd", "veRL (gpg)", by_token(lambda lp, sg, lo, a, gap: -a * lp), {"tau": 0}, why="no regularization there"),
    Peer("importance_sampling", "Trinity-RFT", by_token(lambda lp, sg, lo, a, gap: -a * math.exp(lp - lo))),
    Peer("sft", "Trinity-RFT", by_token(lambda lp, sg, lo, a, gap: -lp)),
    Peer("m2po", "its authors", m2po, why="of each micro-batch there, which depends on the split"),
)


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


ADVANTAGES = (
    Peer("grpo", "veRL", grpo(1e-6)),
    Peer("grpo", "veRL, norm_adv_by_std_in_grpo off", centred, {"std_cal_level": "none"}),
    Peer("grpo", "TRL", grpo(1e-4), {"epsilon": 1e-4}, why="1e-4 there"),
    Peer("grpo", "Trinity-RFT", grpo(1e-6)),
    Peer("rloo", "veRL", rloo),
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
