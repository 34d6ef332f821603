"""Token losses become one number over the global batch, however it is split."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.trainer.algorithms.aggregation import Share, Totals, aggregate

pytestmark = pytest.mark.core

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LIMIT = 32  # max_response_tokens of the run


def ragged(seed: int) -> tuple[torch.Tensor, torch.Tensor, Totals]:
    """Values and masks [B, R], some masks empty, none of them contiguous."""
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 7)), int(rng.integers(1, 9))
    values, mask = torch.tensor(rng.normal(0, 2, (rows, width))), torch.tensor(rng.random((rows, width)) < 0.6)
    mask[rng.integers(rows)] = False
    counts = mask.sum(-1)
    return values, mask.double(), Totals(int(counts.sum()), int((counts > 0).sum()))


def plain(values: torch.Tensor, mask: torch.Tensor, mode: str, totals: Totals) -> float:
    chosen = [[float(v) for v, m in zip(row, flags, strict=True) if m] for row, flags in zip(values, mask, strict=True)]
    if mode == "token-mean":
        return sum(map(sum, chosen)) / max(totals.tokens, 1)
    if mode == "seq-mean-token-sum":
        return sum(map(sum, chosen)) / max(totals.sequences, 1)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in chosen if row) / max(totals.sequences, 1)
    return sum(map(sum, chosen)) / (LIMIT * max(totals.sequences, 1))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@given(seed=st.integers(0, 10_000), mode=st.sampled_from(MODES))
@settings(max_examples=100, deadline=None)
def test_it_adds_up_over_any_split(dtype: torch.dtype, tolerance: float, seed: int, mode: str) -> None:
    values, mask, totals = ragged(seed)
    values, mask = values.to(dtype), mask.to(dtype)
    expected = plain(values, mask, mode, totals)
    found = aggregate(values, mask, mode, totals, LIMIT)
    assert (found.dtype, float(found)) == (dtype, pytest.approx(expected, abs=tolerance, rel=tolerance))
    rows = [aggregate(values[i : i + 1], mask[i : i + 1], mode, totals, LIMIT) for i in range(len(values))]
    assert float(sum(rows)) == pytest.approx(expected, abs=tolerance, rel=tolerance)


def test_dr_grpos_norm_is_a_constant_and_a_mean_over_responses() -> None:
    """sum of all / (responses * max_response_tokens), however long the longest of the batch is. arXiv:2503.20783."""
    values, mask = torch.ones(4, 3), torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0.0]])
    found = aggregate(values, mask, "seq-mean-token-sum-norm", Totals(6, 3), 8)
    assert float(found) == pytest.approx(6 / (3 * 8))
    wider, flags = torch.ones(4, 9), torch.nn.functional.pad(mask, (0, 6))
    assert float(aggregate(wider, flags, "seq-mean-token-sum-norm", Totals(6, 3), 8)) == float(found)
    twice = aggregate(values.repeat(2, 1), mask.repeat(2, 1), "seq-mean-token-sum-norm", Totals(12, 6), 8)
    assert float(twice) == float(found), "not larger for a larger batch"


@given(seed=st.integers(0, 10_000), mode=st.sampled_from(MODES))
@settings(max_examples=50, deadline=None)
def test_a_loss_of_sequences_is_what_its_tokens_would_add_up_to(seed: int, mode: str) -> None:
    values, mask, totals = ragged(seed)
    of_sequence = (values * mask).sum(-1)
    found = float(Share(mode, totals, max_response_tokens=LIMIT).of_sequences(of_sequence, mask))
    assert found == pytest.approx(plain(values, mask, mode, totals), abs=1e-9)


def test_weights_are_of_the_token_losses_and_change_no_denominator() -> None:
    values, mask, totals = ragged(3)
    weights = torch.rand_like(values)
    for mode in MODES:
        found = Share(mode, totals, weights, LIMIT)(values, mask)
        assert float(found) == pytest.approx(plain(values * weights, mask, mode, totals), abs=1e-9)


def test_an_unknown_mode_is_an_error() -> None:
    values, mask, totals = ragged(0)
    with pytest.raises(ValueError, match="token-median"):
        aggregate(values, mask, "token-median", totals)


def test_an_empty_batch_is_zero() -> None:
    nothing = torch.zeros(2, 3)
    for mode in MODES:
        assert float(aggregate(torch.ones(2, 3), nothing, mode, Totals(0, 0))) == 0
