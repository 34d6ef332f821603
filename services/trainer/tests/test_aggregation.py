"""Token losses become one number over the global batch, however it is split."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.trainer.algorithms.aggregation import Share, Totals, aggregate

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def ragged(seed: int) -> tuple[torch.Tensor, torch.Tensor, Totals]:
    """Values and masks [B, R], some masks empty, none of them contiguous."""
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 7)), int(rng.integers(1, 9))
    values, mask = torch.tensor(rng.normal(0, 2, (rows, width))), torch.tensor(rng.random((rows, width)) < 0.6)
    mask[rng.integers(rows)] = False
    counts = mask.sum(-1)
    return values, mask.double(), Totals(int(counts.sum()), int((counts > 0).sum()), width)


def plain(values: torch.Tensor, mask: torch.Tensor, mode: str, totals: Totals) -> float:
    chosen = [[float(v) for v, m in zip(row, flags, strict=True) if m] for row, flags in zip(values, mask, strict=True)]
    if mode == "token-mean":
        return sum(map(sum, chosen)) / max(totals.tokens, 1)
    if mode == "seq-mean-token-sum":
        return sum(map(sum, chosen)) / max(totals.sequences, 1)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in chosen if row) / max(totals.sequences, 1)
    return sum(map(sum, chosen)) / totals.longest


@given(seed=st.integers(0, 10_000), mode=st.sampled_from(MODES))
@settings(max_examples=100, deadline=None)
def test_it_adds_up_over_any_split(seed: int, mode: str) -> None:
    values, mask, totals = ragged(seed)
    expected = plain(values, mask, mode, totals)
    assert float(aggregate(values, mask, mode, totals)) == pytest.approx(expected, abs=1e-9)
    rows = [aggregate(values[i : i + 1], mask[i : i + 1], mode, totals) for i in range(len(values))]
    assert float(sum(rows)) == pytest.approx(expected, abs=1e-9)


@given(seed=st.integers(0, 10_000), mode=st.sampled_from(MODES))
@settings(max_examples=50, deadline=None)
def test_a_loss_of_sequences_is_what_its_tokens_would_add_up_to(seed: int, mode: str) -> None:
    values, mask, totals = ragged(seed)
    of_sequence = (values * mask).sum(-1)
    found = float(Share(mode, totals).of_sequences(of_sequence, mask))
    assert found == pytest.approx(plain(values, mask, mode, totals), abs=1e-9)


def test_weights_are_of_the_token_losses_and_change_no_denominator() -> None:
    values, mask, totals = ragged(3)
    weights = torch.rand_like(values)
    for mode in MODES:
        found = Share(mode, totals, weights)(values, mask)
        assert float(found) == pytest.approx(plain(values * weights, mask, mode, totals), abs=1e-9)


def test_an_unknown_mode_is_an_error() -> None:
    values, mask, totals = ragged(0)
    with pytest.raises(ValueError, match="token-median"):
        aggregate(values, mask, "token-median", totals)


def test_an_empty_batch_is_zero() -> None:
    nothing = torch.zeros(2, 3)
    for mode in MODES:
        assert float(aggregate(torch.ones(2, 3), nothing, mode, Totals(0, 0, 0))) == 0
