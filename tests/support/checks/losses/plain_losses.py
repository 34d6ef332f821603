"""Every policy loss as a loop in plain floats, written from its formula."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from support.checks.losses.loss_cases import LIMIT, OF_TOP, Case, Reference, Rows


def by_token(formula: Callable[..., float], mode: str | None = None) -> Reference:
    """Loss of a formula of one token: (lp, sg, lo, A, mean of sg - lo over the sequence, **args)."""

    def reference(case: Case, lp: Rows, sg: Rows, **args: Any) -> float:
        old, advantages = case.rows("old_logprobs"), case.rows("advantages")
        losses: Rows = []
        for b, row in enumerate(lp):
            gap = sum(s - o for s, o in zip(sg[b], old[b], strict=True)) / max(len(row), 1)
            losses.append([formula(v, sg[b][t], old[b][t], advantages[b][t], gap, **args) for t, v in enumerate(row)])
        return case.mean(losses, mode)

    return reference


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ppo(
    lp: float, sg: float, lo: float, a: float, gap: float, clip_range: float = 0.2, clip_range_low: Any = None,
    clip_range_high: Any = None, clip_ratio_c: float = 3.0, enable_sequence_masking: bool = False,
    delta_sequence_masking: float = 0.1, fallback_to_policy_gradient: bool = False,
) -> float:  # fmt: skip
    low, high = clip_range_low or clip_range, clip_range_high or clip_range
    if fallback_to_policy_gradient:
        lo, gap = sg, 0.0
    r = math.exp(lp - lo)
    loss = max(-a * r, -a * clip(r, 1 - low, 1 + high))
    if a < 0:
        loss = min(loss, -a * clip_ratio_c)
    return 0.0 if enable_sequence_masking and a < 0 and -gap > delta_sequence_masking else loss


def gspo(
    lp: float, sg: float, lo: float, a: float, gap: float, clip_range: float = 0.0, clip_range_low: float | None = 3e-4,
    clip_range_high: float | None = 4e-4,
) -> float:  # fmt: skip
    clip_range_low = clip_range if clip_range_low is None else clip_range_low
    clip_range_high = clip_range if clip_range_high is None else clip_range_high
    s = math.exp(lp - sg + gap)
    return max(-a * s, -a * clip(s, 1 - clip_range_low, 1 + clip_range_high))


def cispo(
    lp: float, sg: float, lo: float, a: float, gap: float, clip_range_low: float = 1.0, clip_range_high: float = 0.28,
    enable_mask_clip: bool = False, mask_clip_range_low: float = 1.0, mask_clip_range_high: float = 0.28,
) -> float:  # fmt: skip
    r = math.exp(sg - lo)
    if enable_mask_clip and ((r > 1 + mask_clip_range_high and a > 0) or (r < 1 - mask_clip_range_low and a < 0)):
        return 0.0
    return -a * clip(r, 1 - clip_range_low, 1 + clip_range_high) * lp


def dppo_tv(
    lp: float, sg: float, lo: float, a: float, gap: float, clip_range_low: float = 0.2, clip_range_high: float = 0.2,
    clip_ratio_c: float = 20.0,
) -> float:  # fmt: skip
    moved = math.exp(sg) - math.exp(lo)
    left_out = moved > clip_range_high if a > 0 else moved < -clip_range_low
    return 0.0 if left_out else -a * min(math.exp(sg - lo), clip_ratio_c) * lp


def dppo_kl(
    lp: float, sg: float, lo: float, a: float, gap: float, clip_range_low: float = 0.2, clip_range_high: float = 0.2,
    clip_ratio_c: float = 20.0,
) -> float:  # fmt: skip
    p, q = math.exp(sg), math.exp(lo)
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    left_out = p > q and kl > clip_range_high if a > 0 else p < q and kl > clip_range_low
    return 0.0 if left_out else -a * min(math.exp(sg - lo), clip_ratio_c) * lp


def sapo(lp: float, sg: float, lo: float, a: float, gap: float, tau_pos: float = 1.0, tau_neg: float = 1.05) -> float:
    tau = tau_pos if a > 0 else tau_neg
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(lp - lo) - 1)))


def gmpo(case: Case, lp: Rows, sg: Rows, clip_range_low: float = 0.4, clip_range_high: float = 0.4) -> float:
    old, advantages, losses = case.rows("old_logprobs"), case.rows("advantages"), []
    for b, row in enumerate(lp):
        logs = [
            min(v - o, clip_range_high) if a > 0 else max(v - o, -clip_range_low) if a < 0 else 0.0
            for v, o, a in zip(row, old[b], advantages[b], strict=True)
        ]
        count = max(len(row), 1)
        losses.append(-sum(advantages[b]) / count * math.exp(sum(logs) / count))
    return case.mean(as_rows(case, losses, lp))


def covariances(case: Case, sg: Rows) -> list[tuple[float, int, int]]:
    """(covariance, row, place) of every trained token."""
    advantages = case.rows("advantages")
    flat = [(a, v, b, t) for b, row in enumerate(sg) for t, (v, a) in enumerate(zip(row, advantages[b], strict=True))]
    middle_a, middle_v = (sum(item[i] for item in flat) / max(len(flat), 1) for i in (0, 1))
    return [((a - middle_a) * (v - middle_v), b, t) for a, v, b, t in flat]


def clip_cov(
    case: Case, lp: Rows, sg: Rows, clip_cov_ratio: float = 0.0002, clip_cov_lb: float = 1.0, clip_cov_ub: float = 5.0,
    **clips: Any,
) -> float:  # fmt: skip
    old, advantages = case.rows("old_logprobs"), case.rows("advantages")
    low, high = clips.get("clip_range_low", 0.2), clips.get("clip_range_high", 0.2)
    chosen = []
    for cov, b, t in covariances(case, sg):
        r, a = math.exp(sg[b][t] - old[b][t]), advantages[b][t]
        touched = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
        if clip_cov_lb < cov < clip_cov_ub and not touched:
            chosen.append((b, t))
    count = max(int(clip_cov_ratio * sum(map(len, sg))), 1)
    drawn = {chosen[i] for i in np.random.default_rng(case.x.step).permutation(len(chosen))[:count]}
    losses: Rows = []
    for b, row in enumerate(lp):
        both = [(math.exp(v - o), a) for v, o, a in zip(row, old[b], advantages[b], strict=True)]
        values = [max(-a * r, -a * clip(r, 1 - low, 1 + high)) for r, a in both]
        losses.append([0.0 if (b, t) in drawn else value for t, value in enumerate(values)])
    return case.mean(losses)


def kl_cov(case: Case, lp: Rows, sg: Rows, kl_cov_ratio: float = 0.0002, ppo_kl_coef: float = 1.0) -> float:
    old, advantages = case.rows("old_logprobs"), case.rows("advantages")
    found = sorted(covariances(case, sg), key=lambda item: -item[0])  # of equal ones the first
    held = {(b, t) for _, b, t in found[: max(int(kl_cov_ratio * len(found)), 1)]}
    losses: Rows = []
    for b, row in enumerate(lp):
        both = enumerate(zip(row, old[b], advantages[b], strict=True))
        losses.append([ppo_kl_coef * abs(v - o) * ((b, t) in held) - a * math.exp(v - o) for t, (v, o, a) in both])
    return case.mean(losses)


def topr(case: Case, lp: Rows, sg: Rows, advantage_threshold: float = 0.0, ratio_level: str = "token") -> float:
    old, advantages, losses = case.rows("old_logprobs"), case.rows("advantages"), []
    for b, row in enumerate(lp):
        whole = math.exp(sum(s - o for s, o in zip(sg[b], old[b], strict=True)))
        one = []
        for t, v in enumerate(row):
            ratio = whole if ratio_level == "sequence" else math.exp(sg[b][t] - old[b][t])
            alpha = min(ratio, 1.0) if advantages[b][t] <= advantage_threshold else 1.0
            one.append(-alpha * advantages[b][t] * v)
        losses.append(one)
    return case.mean(losses)


def sppo(lp: float, sg: float, lo: float, a: float, gap: float, epsilon: float = 0.3) -> float:
    return -a * (lp - lo) if 1 / (1 + epsilon) <= math.exp(sg - lo) <= 1 + epsilon else 0.0


def rec(
    lp: float, sg: float, lo: float, a: float, gap: float, epsilon_low: float = 0.2, epsilon_high: float = 0.2,
    epsilon_low_prime: float = 0.6, epsilon_high_prime: float = 2.0, clip_mode: str = "none", weight: str = "none",
    regularizer: str = "none", regularizer_coef: float = 0.0, temp: float = 1.0, fix_opd_advantage: bool = False,
) -> float:  # fmt: skip
    r, s = math.exp(sg - lo), math.exp(gap)
    two_side = 1 - epsilon_low <= r <= 1 + epsilon_high
    keep = {
        "none": True,
        "two-side": two_side,
        "one-side": r <= 1 + epsilon_high if a >= 0 else r >= 1 - epsilon_low,
        "gspo-one-side": s <= 1 + epsilon_high if a >= 0 else s >= 1 - epsilon_low,
        "ring": two_side or (r <= 1 - epsilon_low_prime if a >= 0 else r >= 1 + epsilon_high_prime),
    }[clip_mode]
    w = {
        "none": 1.0,
        "importance_sampling": r,
        "truncated_importance_sampling": clip(r, 1 - epsilon_low_prime, 1 + epsilon_high_prime),
        "gspo_importance_sampling": s,
        "advantage": math.exp(a / temp),
    }[weight]
    weighed = a * w + (lo - sg if fix_opd_advantage else 0.0)
    loss = -weighed * lp if keep else 0.0
    if regularizer == "k2":
        loss += regularizer_coef * (lp - lo) ** 2
    return loss - regularizer_coef * lp if regularizer == "forward-kl" else loss


def rec_of(case: Case, lp: Rows, sg: Rows, **args: Any) -> float:
    mode = "seq-mean-token-mean" if args.get("clip_mode") == "gspo-one-side" else None
    return by_token(rec, mode)(case, lp, sg, **args)


def sequences(case: Case, lp: Rows) -> tuple[list[float], list[float]]:
    """Mean advantage and sum of lp - lo of each sequence."""
    pairs = zip(lp, case.rows("old_logprobs"), strict=True)
    distances = [sum(v - o for v, o in zip(row, old, strict=True)) for row, old in pairs]
    return [sum(row) / max(len(row), 1) for row in case.rows("advantages")], distances


def as_rows(case: Case, losses: list[float], lp: Rows) -> Rows:
    """A sequence's loss at its first token: it counts as the sum over them (and as their mean times their number)."""
    return [[loss, *[0.0] * (len(row) - 1)] if row else [] for loss, row in zip(losses, lp, strict=True)]


def opmd_kimi(case: Case, lp: Rows, sg: Rows, tau: float = 1.0) -> float:
    losses = [-a * d + tau / 2 * d**2 for a, d in zip(*sequences(case, lp), strict=True)]
    return case.mean(as_rows(case, losses, lp))


def opmd_pairwise(case: Case, lp: Rows, sg: Rows, tau: float = 1.0) -> float:
    values, total = [a - tau * d for a, d in zip(*sequences(case, lp), strict=True)], 0.0
    for group in set(case.groups):
        inside = [i for i, g in enumerate(case.groups) if g == group and lp[i]]
        pairs = sum((values[i] - values[j]) ** 2 for i in inside for j in inside if i < j)
        total += pairs / (2 * tau * len(inside)) if inside else 0.0
    tokens, count = sum(map(len, lp)), max(sum(bool(row) for row in lp), 1)
    return total / {"token-mean": max(tokens, 1), "seq-mean-token-sum": count}.get(case.mode, count * LIMIT)


def m2po_of(
    case: Case, lp: Rows, sg: Rows, m2_threshold: float = 0.04, log_ratio_clip: float = 20.0
) -> float:  # fmt: skip
    old, advantages = case.rows("old_logprobs"), case.rows("advantages")
    bounded = []
    for b, row in enumerate(sg):
        for t, v in enumerate(row):
            gap, a = v - old[b][t], advantages[b][t]
            if (a > 0 and gap > 0) or (a < 0 and gap < 0):
                bounded.append((gap**2, b, t))
    squares = [square for square, _, _ in bounded]
    caps = [cap for cap in squares if sum(min(square, cap) for square in squares) <= m2_threshold * len(squares)]
    whole = len(caps) == len(squares)
    keep = {(b, t) for square, b, t in bounded if whole or square < max(caps, default=-1.0)}
    losses: Rows = []
    for b, row in enumerate(lp):
        losses.append([])
        for t, v in enumerate(row):
            gap, a = sg[b][t] - old[b][t], advantages[b][t]
            free = not ((a > 0 and gap > 0) or (a < 0 and gap < 0))
            bounded_gap = clip(gap, -log_ratio_clip, log_ratio_clip) + (v - sg[b][t])  # only its value is clipped
            losses[-1].append(-a * math.exp(bounded_gap) if free or (b, t) in keep else 0.0)
    return case.mean(losses, "token-mean")


def dpo_of(case: Case, lp: Rows, sg: Rows, beta: float = 0.1, label_smoothing: float = 0.0) -> float:
    reference = case.rows("reference_logprobs")
    gains = [sum(v - r for v, r in zip(*both, strict=True)) for both in zip(lp, reference, strict=True)]
    total, pairs = 0.0, max(case.numbers)
    for number in range(1, pairs + 1):
        z = beta * (gains[case.numbers.index(number)] - gains[case.numbers.index(-number)])
        total += (1 - label_smoothing) * math.log1p(math.exp(-z)) + label_smoothing * math.log1p(math.exp(z))
    return total / pairs


def sft_like(formula: Callable[..., float]) -> Reference:
    def reference(case: Case, lp: Rows, sg: Rows, use_token_level_loss: bool = True, **args: Any) -> float:
        losses = [[formula(v, s, **args) for v, s in zip(*rows, strict=True)] for rows in zip(lp, sg, strict=True)]
        return case.mean(losses, None if use_token_level_loss else "seq-mean-token-mean")

    return reference


def sft_phi(lp: float, sg: float, cutoff_prob: float = 1.0) -> float:
    p = math.exp(sg)
    return -min(lp, math.log(cutoff_prob)) * p * (1 - p)


def mixed(
    case: Case, lp: Rows, mu: float, phi: bool, token_level: bool, sft_loss_agg_mode: str | None = None,
    grpo_loss_agg_mode: str | None = None, **clips: Any,
) -> float:  # fmt: skip
    old, advantages = case.rows("old_logprobs"), case.rows("advantages")
    losses = [
        [ppo(v, 0.0, old[b][t], advantages[b][t], 0.0, **clips) for t, v in enumerate(row)] for b, row in enumerate(lp)
    ]
    sg = case.rows("logprobs")
    taught = [[sft_phi(v, sg[b][t]) if phi else -v for t, v in enumerate(row)] for b, row in enumerate(lp)]
    rolled_out = [True] * (len(lp) - 1) + [False]
    expert = [not flag for flag in rolled_out]
    mode = sft_loss_agg_mode or (None if token_level else "seq-mean-token-mean")
    return (1 - mu) * case.mean(losses, grpo_loss_agg_mode, rolled_out) + mu * case.mean(taught, mode, expert)


def mix(case: Case, lp: Rows, sg: Rows, mu: float = 0.1, use_token_level_loss_in_sft: bool = True, **c: Any) -> float:
    return mixed(case, lp, mu, False, use_token_level_loss_in_sft, **c)


def mix_chord(
    case: Case, lp: Rows, sg: Rows, mu_warmup_steps: int = 0, mu_decay_steps: int = 0, mu_peak: float = 0.1,
    mu_valley: float = 0.1, enable_phi_function: bool = True, use_token_level_loss_in_sft: bool = True, **c: Any,
) -> float:  # fmt: skip
    done = case.x.step - 1
    if done < mu_warmup_steps:
        mu = mu_peak * done / mu_warmup_steps
    elif done < mu_warmup_steps + mu_decay_steps:
        turn = math.cos(math.pi * (done - mu_warmup_steps) / mu_decay_steps)
        mu = mu_valley + (mu_peak - mu_valley) * (1 + turn) / 2
    else:
        mu = mu_valley
    return mixed(case, lp, mu, enable_phi_function, use_token_level_loss_in_sft, **c)


# name -> reference, and arguments to test in addition to the defaults
CLIPS: list[dict[str, Any]] = [{"clip_range_high": 0.28}, {"clip_range": 0.1}]
REC: list[dict[str, Any]] = [
    *({"clip_mode": mode} for mode in ("one-side", "gspo-one-side", "two-side", "ring")),
    *({"weight": w, "temp": 2.0, "epsilon_high_prime": 0.3} for w in (
        "importance_sampling", "truncated_importance_sampling", "gspo_importance_sampling", "advantage"
    )),
    {"regularizer": "k2", "regularizer_coef": 0.3},
    {"regularizer": "forward-kl", "regularizer_coef": 0.3, "clip_mode": "ring", "weight": "importance_sampling"},
    {"fix_opd_advantage": True},
]  # fmt: skip
M2PO: list[dict[str, Any]] = [
    *({"m2_threshold": threshold} for threshold in (0.001, 0.3, 1.0)),
    *({"log_ratio_clip": bound} for bound in (0.1, 0.5)),
]
SFT: list[dict[str, Any]] = [{"use_token_level_loss": False}]
AGGREGATED_APART = {"sft_loss_agg_mode": "seq-mean-token-sum", "grpo_loss_agg_mode": "token-mean"}
SCHEDULE = {"mu_warmup_steps": 3, "mu_decay_steps": 3, "mu_peak": 0.9}


def top_k_distill(case: Case, lp: Rows, sg: Rows, beta: float = 0.5, top: Any = None) -> float:
    """`top` replaces the policy's log-probabilities of the teacher's tokens, [B, R, k], which move with lp."""
    assert case.x.teacher_top is not None and case.x.top_logprobs is not None
    policy, teacher = (case.x.top_logprobs if top is None else top).tolist(), case.x.teacher_top.tolist()
    losses: Rows = []
    for b, flags in enumerate(case.x.mask.tolist()):
        places = [t for t, flag in enumerate(flags) if flag]
        moved = [OF_TOP * (one - at) for one, at in zip(lp[b], sg[b], strict=True)]
        both = zip(places, moved, strict=True)
        losses.append([divergence(teacher[b][t], [v + more for v in policy[b][t]], beta) for t, more in both])
    return case.mean(losses)


def divergence(teacher: list[float], policy: list[float], beta: float) -> float:
    """The generalized Jensen-Shannon divergence of both with a bucket of all other tokens."""
    p, q = [math.exp(v) for v in teacher], [math.exp(v) for v in policy]
    p, q = [*p, max(1 - sum(p), 1e-7)], [*q, max(1 - sum(q), 1e-7)]
    if beta in (0, 1):
        pairs = zip(p, q, strict=True) if beta == 0 else zip(q, p, strict=True)
        return sum(one * math.log(one / other) for one, other in pairs)
    m = [beta * one + (1 - beta) * other for one, other in zip(p, q, strict=True)]
    return sum(
        beta * one * math.log(one / both) + (1 - beta) * other * math.log(other / both)
        for one, other, both in zip(p, q, m, strict=True)
    )


REFERENCES: dict[str, tuple[Reference, list[dict[str, Any]]]] = {
    "ppo": (
        by_token(ppo),
        [
            *CLIPS,
            {"clip_range": None, "clip_range_low": 0.1, "clip_range_high": 0.3},
            {"clip_ratio_c": 1.3},
            {"enable_sequence_masking": True, "delta_sequence_masking": 0.05},
            {"fallback_to_policy_gradient": True, "enable_sequence_masking": True},
        ],
    ),
    "gspo": (
        by_token(gspo),
        [{"clip_range_low": 0.2, "clip_range_high": 0.3}, {"clip_range": 0.1, "clip_range_low": None}],
    ),
    "cispo": (
        by_token(cispo),
        [{"clip_range_low": 0.2}, {"enable_mask_clip": True, "clip_range_low": 0.2, "mask_clip_range_low": 0.1}],
    ),
    "dppo_tv": (by_token(dppo_tv), [{"clip_range_low": 0.05, "clip_range_high": 0.1}, {"clip_ratio_c": 1.1}]),
    "dppo_kl": (by_token(dppo_kl), [{"clip_range_low": 0.002, "clip_range_high": 0.01}, {"clip_ratio_c": 1.1}]),
    "sapo": (by_token(sapo), [{"tau_pos": 0.5, "tau_neg": 3.0}]),
    "gmpo": (gmpo, [{"clip_range_low": 0.05, "clip_range_high": 0.1}]),
    "clip_cov": (
        clip_cov,
        [{"clip_cov_lb": 0.0, "clip_cov_ratio": 0.3}, {"clip_cov_lb": 0.1, "clip_range_high": 0.05}],
    ),
    "kl_cov": (kl_cov, [{"kl_cov_ratio": 0.4, "ppo_kl_coef": 0.3}]),
    "topr": (topr, [{"advantage_threshold": 0.5}, {"ratio_level": "sequence"}]),
    "sppo": (by_token(sppo), [{"epsilon": 0.05}]),
    "rec": (rec_of, REC),
    "opmd": (by_token(lambda lp, sg, lo, a, gap, tau=1.0: -a * lp / (1 + tau)), [{"tau": 0.0}]),
    "opmd_kimi": (opmd_kimi, [{"tau": 0.2}]),
    "opmd_pairwise": (opmd_pairwise, [{"tau": 0.2}]),
    "importance_sampling": (by_token(lambda lp, sg, lo, a, gap: -a * math.exp(lp - lo)), []),
    "m2po": (m2po_of, M2PO),
    "dpo": (dpo_of, [{"beta": 0.7, "label_smoothing": 0.2}]),
    "sft": (sft_like(lambda lp, sg: -lp), SFT),
    "sft_is": (sft_like(lambda lp, sg: -lp * math.exp(sg)), SFT),
    "sft_phi": (sft_like(sft_phi), [*SFT, {"cutoff_prob": 0.5}]),
    "mix": (mix, [*CLIPS, {"mu": 0.6, "use_token_level_loss_in_sft": False}, AGGREGATED_APART]),
    "top_k_distill": (top_k_distill, [{"beta": 0.0}, {"beta": 1.0}, {"beta": 0.2}]),
    "mix_chord": (mix_chord, [SCHEDULE, {"enable_phi_function": False, "mu_valley": 0.7}, AGGREGATED_APART]),
}
