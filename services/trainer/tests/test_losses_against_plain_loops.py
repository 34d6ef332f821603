"""Every policy loss against a loop in plain floats written from its formula: values and gradients, on ragged batches.

A reference gets `lp`, the log-probabilities that are differentiated, and `sg`, the same numbers behind a stop-gradient;
its gradient is taken by differences.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.config.algorithm_parts import POLICY_LOSSES as NAMES
from trinity.trainer.algorithms.aggregation import Share, Totals
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.policy_losses import POLICY_LOSSES, dpo, m2po, opmd

pytestmark = pytest.mark.core

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LIMIT = 8  # max_response_tokens of the run
Rows = list[list[float]]


@dataclass(frozen=True)
class Case:
    """A batch, as tensors and, of the trained tokens alone, as lists."""

    x: LossInputs
    totals: Totals
    mode: str
    groups: list[int]
    numbers: list[int]  # preference pairs: k, -k or 0

    def rows(self, name: str) -> Rows:
        values, mask = getattr(self.x, name).detach(), self.x.mask
        return [
            [float(v) for v, m in zip(row, flags, strict=True) if m] for row, flags in zip(values, mask, strict=True)
        ]

    def mean(self, losses: Rows, mode: str | None = None, among: list[bool] | None = None) -> float:
        """Aggregation, as its documentation says; `among` some of the sequences."""
        chosen = [row for index, row in enumerate(losses) if among is None or among[index]]
        mode, sequences = mode or self.mode, sum(bool(row) for row in chosen)
        if mode == "token-mean":
            return sum(map(sum, chosen)) / max(sum(map(len, chosen)), 1)
        if mode == "seq-mean-token-sum":
            return sum(map(sum, chosen)) / max(sequences, 1)
        if mode == "seq-mean-token-mean":
            return sum(sum(row) / len(row) for row in chosen if row) / max(sequences, 1)
        return sum(map(sum, chosen)) / (LIMIT * max(sequences, 1))


def case_of(seed: int, mode: str, dtype: torch.dtype = torch.float64, constant: bool = False) -> Case:
    """Ratios mostly near 1, some far; the last sequence is an expert's; prompts and padding hold numbers too."""
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(2, 7)), int(rng.integers(1, 7))
    old = -rng.exponential(1.0, (rows, width))
    new = np.minimum(old + rng.normal(0, rng.choice([0.02, 0.3, 1.0]), (rows, width)), -1e-3)
    advantages = rng.normal(0, 1.5, (rows, 1)).repeat(width, 1)
    if not constant:
        advantages = advantages + rng.normal(0, 0.2, (rows, width))
    mask = rng.random((rows, width)) < 0.75
    mask[rng.integers(rows)] &= rng.random() < 0.5
    expert = np.zeros(rows)
    expert[-1] = 1
    groups = [int(g) for g in rng.integers(0, 3, rows)]
    numbers = [k * s for k in range(1, rows // 2 + 1) for s in (1, -1)] + [0] * (rows % 2)
    # numbers that float32 has too, so that both dtypes are on the same side of every clip
    made = [torch.tensor(a.astype(np.float32)).to(dtype) for a in (new, old, advantages, new * 0.9 - 0.05)]
    flags = torch.tensor(mask).to(dtype)
    x = LossInputs(
        logprobs=made[0].requires_grad_(),
        entropy=torch.zeros_like(flags),
        mask=flags,
        old_logprobs=made[1],
        advantages=made[2],
        reference_logprobs=made[3],
        expert_B=torch.tensor(expert).to(dtype),
        pairs_B=torch.tensor(np.sign(numbers)).to(dtype),
        step=int(rng.integers(1, 8)),
    )
    part = [Totals(int(f.sum()), int((f.sum(-1) > 0).sum())) for f in (flags, flags[:-1], flags[-1:])]
    totals = replace(part[0], pairs=rows // 2, rolled_out=part[1], expert=part[2])
    return Case(x, totals, mode, groups, numbers)


def with_peers(case: Case, name: str, args: dict[str, Any]) -> Case:
    """What the sequences have to know of each other."""
    x, mask = case.x, case.x.mask > 0
    if name == "m2po":
        ratios = list((x.logprobs - x.old_logprobs).detach().double())
        kept = m2po.keep(ratios, list(x.advantages.double()), list(mask), args.get("m2_threshold", 0.04))
        return replace(case, x=replace(x, kept=torch.stack(kept).to(x.mask.dtype)))
    if name == "dpo":
        assert x.reference_logprobs is not None
        distances = ((x.logprobs - x.reference_logprobs).detach() * x.mask).sum(-1).tolist()
        peers = dpo.partners(distances, case.numbers)
    else:
        ratios = list((x.logprobs - x.old_logprobs).detach())
        peers = opmd.group_means(list(x.advantages), ratios, list(mask), case.groups, args.get("tau", 1.0))
    return replace(case, x=replace(x, peers_B=torch.tensor(peers, dtype=x.mask.dtype)))


Reference = Callable[..., float]


def by_token(formula: Callable[..., float], mode: str | None = None) -> Reference:
    """Of a formula of one token: (lp, sg, lo, A, mean of sg - lo over the sequence, **args)."""

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


def sapo(lp: float, sg: float, lo: float, a: float, gap: float, tau_pos: float = 1.0, tau_neg: float = 1.05) -> float:
    tau = tau_pos if a > 0 else tau_neg
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(lp - lo) - 1)))


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
    """Of each: mean advantage, and sum of lp - lo."""
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
    keep = {(b, t) for square, b, t in bounded if square <= max(caps, default=-1.0)}
    losses: Rows = []
    for b, row in enumerate(lp):
        losses.append([])
        for t, v in enumerate(row):
            gap, a = sg[b][t] - old[b][t], advantages[b][t]
            free = not ((a > 0 and gap > 0) or (a < 0 and gap < 0))
            bounded_gap = clip(gap, -log_ratio_clip, log_ratio_clip) + (v - sg[b][t])  # its value alone is clipped
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


# name -> reference, and arguments to try beside the defaults
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
REFERENCES: dict[str, tuple[Reference, list[dict[str, Any]]]] = {
    "ppo": (
        by_token(ppo),
        [
            *CLIPS,
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
    "sapo": (by_token(sapo), [{"tau_pos": 0.5, "tau_neg": 3.0}]),
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
    "mix_chord": (mix_chord, [SCHEDULE, {"enable_phi_function": False, "mu_valley": 0.7}, AGGREGATED_APART]),
}
# Of those that are refused with some: what they are tried with.
ACCEPTED = {"opmd_pairwise": ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"], "m2po": ["token-mean"]}


def slopes(reference: Callable[[Rows], float], lp: Rows) -> Rows:
    """Its derivative by differences on both sides of each number."""
    step, result = 1e-6, []
    for b, row in enumerate(lp):
        result.append([])
        for t in range(len(row)):
            moved = [[list(r) for r in lp] for _ in range(2)]
            moved[0][b][t] += step
            moved[1][b][t] -= step
            result[b].append((reference(moved[0]) - reference(moved[1])) / (2 * step))
    return result


def loss_of(name: str, case: Case, args: dict[str, Any]) -> torch.Tensor:
    defaults = {k: v for k, v in NAMES[name].items() if k != "loss_agg_mode"}
    share = Share(case.mode, case.totals, max_response_tokens=LIMIT)
    loss, report = POLICY_LOSSES[name](case.x.only_masked(), share, **{**defaults, **args})
    assert all(pair.shape == (2,) and pair.dtype == torch.float32 for pair in report.values())
    return loss


def test_every_registered_name_has_a_reference() -> None:
    assert set(REFERENCES) == set(POLICY_LOSSES) == set(NAMES)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@given(seed=st.integers(0, 10_000), choice=st.integers(0, 99), mode=st.integers(0, 11))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_values_and_gradients(
    name: str, dtype: torch.dtype, tolerance: float, seed: int, choice: int, mode: int
) -> None:
    reference, variants = REFERENCES[name]
    args = [{}, *variants][choice % (len(variants) + 1)]
    modes = ACCEPTED.get(name, MODES)
    case = with_peers(case_of(seed, modes[mode % len(modes)], dtype), name, args)
    loss = loss_of(name, case, args)
    (gradient,) = torch.autograd.grad(loss, case.x.logprobs, allow_unused=True)
    gradient = torch.zeros_like(case.x.logprobs) if gradient is None else gradient
    sg = case.rows("logprobs")
    assert float(loss.detach()) == pytest.approx(reference(case, sg, sg, **args), abs=tolerance, rel=tolerance)
    expected = slopes(lambda lp: reference(case, lp, sg, **args), sg)
    for row, flags, wanted in zip(gradient, case.x.mask, expected, strict=True):
        assert row[flags > 0].tolist() == pytest.approx(wanted, abs=tolerance, rel=tolerance)
        assert not row[flags == 0].any()


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_gspo_is_that_of_whole_sequences(seed: int) -> None:
    """Equation 5 of its paper: the ratio exp(mean(lp - lo)) itself is differentiated."""
    case = case_of(seed, "seq-mean-token-mean", constant=True)
    args = {"clip_range_low": 0.05, "clip_range_high": 0.1}

    def reference(lp: Rows) -> float:
        losses = []
        for row, old, a in zip(lp, case.rows("old_logprobs"), case.rows("advantages"), strict=True):
            if row:
                s = math.exp(sum(v - o for v, o in zip(row, old, strict=True)) / len(row))
                losses.append(max(-a[0] * s, -a[0] * clip(s, 0.95, 1.1)))
        return sum(losses) / max(len(losses), 1)

    loss, sg = loss_of("gspo", case, args), case.rows("logprobs")
    assert float(loss.detach()) == pytest.approx(reference(sg), abs=1e-9)
    (gradient,) = torch.autograd.grad(loss, case.x.logprobs)
    for row, flags, wanted in zip(gradient, case.x.mask, slopes(reference, sg), strict=True):
        assert row[flags > 0].tolist() == pytest.approx(wanted, abs=1e-6)


def test_m2po_clips_where_the_capped_second_moment_is_reached_and_keeps_what_no_clip_would_touch() -> None:
    squares = [0.01, 0.04, 0.09, 0.5]
    ratios = [torch.tensor([value**0.5, -(value**0.5)]) for value in squares]
    advantages = [torch.tensor([1.0, 1.0])] * 4
    kept = m2po.keep(ratios, advantages, [torch.ones(2)] * 4, 0.05)
    assert [row.tolist() for row in kept] == [[True, True]] * 2 + [[False, True]] * 2
    masked = m2po.keep(ratios, advantages, [torch.tensor([0, 1])] * 4, 0.05)
    assert [row.tolist() for row in masked] == [[False, True]] * 4
    assert m2po.keep([], [], [], 0.05) == []


def test_a_ratio_beyond_e_to_the_20_is_finite() -> None:
    x = case_of(1, "token-mean").x
    far = replace(x, logprobs=x.logprobs.detach() + 900, old_logprobs=x.old_logprobs - 900)
    for name in ("ppo", "gspo", "cispo", "sapo", "topr", "sppo", "rec", "importance_sampling", "m2po"):
        case = with_peers(replace(case_of(1, "token-mean"), x=far), name, {})
        assert math.isfinite(float(loss_of(name, case, {}))), name


def test_cispo_trains_the_tokens_that_ppo_would_clip() -> None:
    """Equations 4 and 5 of its paper: the weight is clipped, and no token is left out."""
    case, above = case_of(3, "token-mean"), math.log(2.0)
    x = replace(case.x, old_logprobs=case.x.logprobs.detach() - above, advantages=torch.ones_like(case.x.advantages))
    case = replace(case, x=x)
    gradients = {
        name: torch.autograd.grad(loss_of(name, case, args), x.logprobs, allow_unused=True)[0]
        for name, args in (("cispo", {}), ("ppo", {}))
    }
    share = 1.28 / case.totals.tokens
    torch.testing.assert_close(gradients["cispo"], -share * x.mask)
    assert not gradients["ppo"].any()
    masked = torch.autograd.grad(loss_of("cispo", case, {"enable_mask_clip": True}), x.logprobs)[0]
    assert not masked.any()
