"""Each function against a loop in float64 written from its formula, on ragged random batches."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.trainer.algorithms.advantages import grpo
from trinity.trainer.algorithms.aggregation import Totals, aggregate
from trinity.trainer.algorithms.kl import KL
from trinity.trainer.algorithms.policy_losses import ppo, sft

seeds = st.integers(0, 10_000)
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def ragged(seed: int, dtype: torch.dtype = torch.float64):  # type: ignore[no-untyped-def]
    """logprobs, old_logprobs, advantages, mask: [B, R] with ragged masks, some of them empty."""
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    new, old = -rng.exponential(1.0, (2, rows, width))
    advantages = np.repeat(rng.normal(0, 1.5, (rows, 1)), width, 1)
    mask = np.arange(width)[None] < rng.integers(0, width + 1, rows)[:, None]
    made = [torch.tensor(a, dtype=dtype) for a in (new, old, advantages, mask.astype(float))]
    made[0].requires_grad_()
    return made


@given(seed=seeds, low=st.sampled_from([None, 0.1, 0.3]), high=st.sampled_from([None, 0.28]))
@settings(max_examples=60, deadline=None)
def test_ppo(seed: int, low: float | None, high: float | None) -> None:
    new, old, advantages, mask = ragged(seed)
    loss, report = ppo(new, old, advantages, mask, clip_range_low=low, clip_range_high=high, clip_ratio_c=3.0)
    lower, upper = 1 - (0.2 if low is None else low), 1 + (0.2 if high is None else high)
    clipped = 0
    for b in range(new.shape[0]):
        for r in range(new.shape[1]):
            ratio = math.exp(max(-20.0, min(20.0, float(new.detach()[b, r]) - float(old[b, r]))))
            a = float(advantages[b, r])
            term = max(-a * ratio, -a * min(max(ratio, lower), upper))
            clipped += bool(mask[b, r]) and -a * min(max(ratio, lower), upper) > -a * ratio
            if a < 0:
                term = min(term, -a * 3.0)
            assert float(loss[b, r]) == pytest.approx(term, abs=1e-9)
    assert float(report["pg_clipfrac"][0]) == clipped
    (loss * mask).sum().backward()
    assert torch.isfinite(new.grad).all()
    assert (new.grad[mask == 0] == 0).all()


@given(seed=seeds)
@settings(max_examples=40, deadline=None)
def test_the_gradient_of_ppo(seed: int) -> None:
    new, old, advantages, mask = ragged(seed)

    def total(x: torch.Tensor) -> torch.Tensor:
        return (ppo(x, old, advantages, mask)[0] * mask).sum()

    (grad,) = torch.autograd.grad(total(new), new)
    step = 1e-6
    for index in np.ndindex(*new.shape):
        moved = [new.detach().clone() for _ in range(2)]
        moved[0][index] += step
        moved[1][index] -= step
        values = [float(total(m)) for m in moved]
        slopes = [(values[0] - float(total(new))) / step, (float(total(new)) - values[1]) / step]
        if abs(slopes[0] - slopes[1]) > 1e-3:
            continue  # at a kink there are two
        assert float(grad[index]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-4)


@given(seed=seeds, mode=st.sampled_from(MODES))
@settings(max_examples=80, deadline=None)
def test_aggregation_adds_up_over_any_split(seed: int, mode: str) -> None:
    values, _, _, mask = ragged(seed)
    counts = [int(row.sum()) for row in mask]
    longest = values.shape[1]
    totals = Totals(sum(counts), sum(c > 0 for c in counts), longest)
    sums = [
        sum(float(v) for v, m in zip(row, flags, strict=True) if m) for row, flags in zip(values, mask, strict=True)
    ]
    if mode == "token-mean":
        expected = sum(sums) / max(sum(counts), 1)
    elif mode == "seq-mean-token-sum":
        expected = sum(sums) / max(totals.sequences, 1)
    elif mode == "seq-mean-token-mean":
        expected = sum(s / c for s, c in zip(sums, counts, strict=True) if c) / max(totals.sequences, 1)
    else:
        expected = sum(sums) / longest
    assert float(aggregate(values, mask, mode, totals)) == pytest.approx(expected, abs=1e-9)
    parts = [aggregate(values[i : i + 1], mask[i : i + 1], mode, totals) for i in range(len(values))]
    assert float(sum(parts)) == pytest.approx(expected, abs=1e-9)


@given(seed=seeds)
@settings(max_examples=60, deadline=None)
def test_grpo_advantages(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = np.sort(rng.integers(0, 4, int(rng.integers(1, 20))))
    rewards = rng.integers(0, 3, len(groups)).astype(float)
    found = grpo(torch.tensor(rewards), torch.tensor(groups))
    for index, group in enumerate(groups):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(members) == 1:
            mean, std = 0.0, 1.0
        else:
            mean = sum(members) / len(members)
            std = math.sqrt(sum((m - mean) ** 2 for m in members) / (len(members) - 1))
        assert float(found[index]) == pytest.approx((rewards[index] - mean) / (std + 1e-6), abs=1e-6)


def test_a_group_without_spread_can_be_left_out() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    found = grpo(rewards, groups, std_threshold=0.0)
    assert found[:2].tolist() == [0, 0]
    assert found[3] > 0


@given(seed=seeds)
@settings(max_examples=40, deadline=None)
def test_kl_estimators(seed: int) -> None:
    new, old, _, _ = ragged(seed)
    formulas = {
        "k1": lambda lp, ref: lp - ref,
        "k2": lambda lp, ref: (lp - ref) ** 2 / 2,
        "k3": lambda lp, ref: math.exp(ref - lp) - 1 - (ref - lp),
        "low_var_kl": lambda lp, ref: min(
            10.0, math.exp(min(20.0, max(-20.0, ref - lp))) - 1 - min(20.0, max(-20.0, ref - lp))
        ),
        "abs": lambda lp, ref: abs(lp - ref),
    }
    assert set(formulas) == set(KL)
    for name, formula in formulas.items():
        found = KL[name](new, old)
        for index in np.ndindex(*new.shape):
            assert float(found[index]) == pytest.approx(formula(float(new[index]), float(old[index])), abs=1e-9), name


def test_sft_is_the_negative_log_likelihood() -> None:
    new, _, _, mask = ragged(3)
    loss, report = sft(new, None, None, mask)
    assert torch.equal(loss, -new)
    assert float(report["sft_loss"][1]) == float(mask.sum())
