"""Losses of veRL, TRL, Trinity-RFT and M2PO's authors, as loops in plain floats, to be compared with ours.

Read in: veRL of 2026-01-29 and 0.9.1 (verl/trainer/ppo/core_algos.py), TRL of 2026-07-24
(trl/trainer/grpo_trainer.py) and 1.16 (dpo and gmpo), Trinity-RFT 0.6.0 (trinity/algorithm), Infini-AI-Lab/M2PO.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.checks.losses.loss_cases import Case, Reference, Rows
from support.checks.losses.plain_losses import by_token, clip, covariances, sft_like


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


def geo_mean(case: Case, lp: Rows, sg: Rows, bound: float = 0.2) -> float:
    """Loss of log-ratios clipped at `bound`. The mean is over sequences with tokens."""
    total, count = 0.0, 0
    for row, old, advantages in zip(lp, case.rows("old_logprobs"), case.rows("advantages"), strict=True):
        if row:
            signs = [math.copysign(1, a) for a in advantages]
            gaps = [v - o for v, o in zip(row, old, strict=True)]
            inside = [s * min(s * d, s * clip(d, -bound, bound)) for s, d in zip(signs, gaps, strict=True)]
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


def clip_cov(case: Case, lp: Rows, sg: Rows) -> float:
    """Every token whose covariance is between 1 and 5 and that PPO does not clip, with a ratio of 1."""
    old, advantages = case.rows("old_logprobs"), case.rows("advantages")
    inside = {(b, t) for cov, b, t in covariances(case, sg) if 1 < cov < 5}
    losses: Rows = []
    for b, row in enumerate(lp):
        losses.append([])
        for t, v in enumerate(row):
            a, r, now = advantages[b][t], math.exp(v - old[b][t]), math.exp(sg[b][t] - old[b][t])
            clipped = -a * clip(now, 0.8, 1.2) > -a * now
            held = (b, t) in inside and not clipped
            losses[-1].append(0.0 if held else max(-a * r, -a * clip(r, 0.8, 1.2)))
    return case.mean(losses)


def kl_cov(case: Case, lp: Rows, sg: Rows) -> float:
    """|lp - lo| is added at the largest covariance; of 5,000 tokens there would be a second."""
    old, advantages = case.rows("old_logprobs"), case.rows("advantages")
    held = max(covariances(case, sg), key=lambda item: item[0], default=(0.0, -1, -1))[1:]
    losses: Rows = []
    for b, row in enumerate(lp):
        both = zip(row, old[b], advantages[b], strict=True)
        losses.append([abs(v - o) * ((b, t) == held) - a * math.exp(v - o) for t, (v, o, a) in enumerate(both)])
    return case.mean(losses)


def whole_ratio(case: Case, lp: Rows, sg: Rows) -> float:
    """exp of a sequence's mean of lp - lo at each of its tokens, clipped at 0.2; the mean over sequences' means."""
    old, advantages, losses = case.rows("old_logprobs"), case.rows("advantages"), []
    for row, before, given in zip(lp, old, advantages, strict=True):
        s = math.exp(sum(v - o for v, o in zip(row, before, strict=True)) / max(len(row), 1))
        losses.append([max(-a * s, -a * clip(s, 0.8, 1.2)) for a in given])
    return case.mean(losses, "seq-mean-token-mean")


def with_experts(phi: bool) -> Reference:
    """0.9 of the PPO of what was rolled out, and 0.1 of the SFT of the experts."""

    def loss(case: Case, lp: Rows, sg: Rows) -> float:
        expert = [bool(flag) for flag in case.x.expert_B]  # type: ignore[union-attr]
        old, advantages, rolled_out, taught = case.rows("old_logprobs"), case.rows("advantages"), [], []
        for b, row in enumerate(lp):
            both = zip(row, old[b], advantages[b], strict=True)
            values = [(-a * math.exp(v - o), -a * clip(math.exp(v - o), 0.8, 1.2), a) for v, o, a in both]
            rolled_out.append([min(max(x, y), -3 * a) if a < 0 else max(x, y) for x, y, a in values])
            p = [math.exp(s) for s in sg[b]]
            taught.append([-v * (q * (1 - q) if phi else 1) for v, q in zip(row, p, strict=True)])
        own = case.mean(rolled_out, "token-mean", [not flag for flag in expert])
        return 0.9 * own + 0.1 * case.mean(taught, "token-mean", expert)

    return loss


def dpo(together: bool) -> Reference:
    """beta 0.1. together: all pairs of a micro-batch in one logit."""

    def loss(case: Case, lp: Rows, sg: Rows) -> float:
        reference = case.rows("reference_logprobs")
        gains = [sum(v - r for v, r in zip(*both, strict=True)) for both in zip(lp, reference, strict=True)]
        pairs = range(1, max(case.numbers) + 1)
        logits = [0.1 * (gains[case.numbers.index(k)] - gains[case.numbers.index(-k)]) for k in pairs]
        logits = [sum(logits)] if together else logits
        return sum(math.log1p(math.exp(-z)) for z in logits) / len(logits)

    return loss


def dppo_tv(lp: float, sg: float, lo: float, a: float, gap: float) -> float:
    moved = math.exp(sg) - math.exp(lo)
    valid = moved <= 0.2 if a > 0 else moved >= -0.2
    return -a * min(math.exp(sg - lo), 3.0) * lp * valid


def dppo_kl(lp: float, sg: float, lo: float, a: float, gap: float) -> float:
    p, q = math.exp(sg), math.exp(lo)
    kl = q * (lo - sg) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    valid = kl <= 0.2 or (p <= q if a > 0 else p >= q)
    return -a * min(math.exp(sg - lo), 3.0) * lp * valid


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
        "clips at 0.2 there; the paper's are 0.0003 and 0.0004. Since 0.9 `loss_agg_mode` counts there, `token-mean` "
        "unless given",
    ),
    Peer("gspo", "Trinity-RFT", of_sequences(3e-4, 4e-4), mode="seq-mean-token-mean"),
    Peer(
        "gspo",
        "TRL",
        whole_ratio,
        {"clip_range": 0.2, "clip_range_low": None, "clip_range_high": None},
        "seq-mean-token-mean",
        "clips at 0.2 there; a token's advantage weighs the gradient of all tokens of its sequence there, of its own "
        "here (GSPO-token): the same where a sequence has one advantage, as TRL's have",
    ),
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
    Peer(
        "dppo_tv",
        "veRL",
        by_token(dppo_tv),
        {"clip_ratio_c": 3.0},
        why="its configuration has the bound of PPO's dual clip, 3; the paper advises a large one",
    ),
    Peer("dppo_kl", "veRL", by_token(dppo_kl), {"clip_ratio_c": 3.0}, why="as `dppo_tv`"),
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
    Peer("gmpo", "TRL", lambda case, lp, sg: geo_mean(case, lp, sg, 0.4), mode="seq-mean-token-sum"),
    Peer(
        "clip_cov",
        "veRL",
        clip_cov,
        {"clip_cov_ratio": 1.0},
        why="draws other tokens of those in the band there; a ratio of 1 draws all",
    ),
    Peer("kl_cov", "veRL", kl_cov),
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
    Peer("rec", "Trinity-RFT", by_token(lambda lp, sg, lo, a, gap: -a * lp)),
    *(Peer("sft", whose, by_token(lambda lp, sg, lo, a, gap: -lp)) for whose in ("veRL", "TRL", "Trinity-RFT")),
    Peer("sft_is", "Trinity-RFT", sft_like(lambda lp, sg: -lp * math.exp(sg))),
    Peer("sft_phi", "Trinity-RFT", sft_like(lambda lp, sg: -lp * math.exp(sg) * (1 - math.exp(sg)))),
    Peer("mix", "Trinity-RFT", with_experts(False), why="of each micro-batch there, which depends on the split"),
    Peer("mix_chord", "Trinity-RFT", with_experts(True), why="as `mix`"),
    Peer("dpo", "TRL", dpo(False)),
    Peer("dpo", "Trinity-RFT", dpo(True), why="adds the pairs of a micro-batch up in one logit there"),
    Peer("m2po", "its authors", m2po, why="of each micro-batch there, which depends on the split"),
)
