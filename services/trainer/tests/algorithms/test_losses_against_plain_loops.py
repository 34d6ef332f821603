"""Every policy loss against its loop in plain floats: values and gradients, on ragged batches."""

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.checks.losses import peer_advantages, peer_algorithms, plain_advantages
from support.checks.losses.loss_cases import (
    Rows,
    case_of,
    gradient_of,
    loss_and_clipped,
    loss_of,
    modes_of,
    slopes,
    with_peers,
)
from support.checks.losses.plain_losses import REFERENCES, clip
from trinity.plugins.declarations import ADVANTAGES
from trinity.trainer.algorithms.inputs import WholeBatch
from trinity.trainer.algorithms.policy_losses import POLICY_LOSSES, m2po

pytestmark = pytest.mark.core

# Losses whose clip takes a token's gradient away.
HARD_CLIPS = ("clip_cov", "dppo_kl", "dppo_tv", "gmpo", "gspo", "m2po", "ppo", "rec", "sppo")


def test_every_registered_name_has_a_reference() -> None:
    assert set(REFERENCES) == set(POLICY_LOSSES)


def test_comparisons_with_other_frameworks_are_of_registered_names() -> None:
    assert {peer.name for peer in peer_algorithms.LOSSES} < set(POLICY_LOSSES)
    compared = {peer.name for peer in peer_advantages.ADVANTAGES}
    assert compared == set(plain_advantages.REFERENCES) - {"tree"}, "none of them has episodes that branch"


def test_every_registered_name_has_a_row_of_measured_differences(repository: Path) -> None:
    page = (repository / "docs/algorithms_measured.md").read_text()
    tables = dict(re.findall(r"\n\| (policy loss|advantages), to a loop \|.*\n.*\n((?:\|.*\n)+)", page))
    assert re.findall(r"^\| `(\w+)` \|", tables["policy loss"], re.MULTILINE) == sorted(POLICY_LOSSES)
    own = sorted(name for name, one in ADVANTAGES.items() if not one.alias_of)
    assert re.findall(r"`(\w+)`", tables["advantages"]) == own
    alone = page.partition("Compared with none of them: ")[2].partition(".")[0]
    compared = {peer.name for peer in peer_algorithms.LOSSES}
    assert re.findall(r"`(\w+)`", alone) == sorted(set(POLICY_LOSSES) - compared)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@given(seed=st.integers(0, 10_000), choice=st.integers(0, 99), mode=st.integers(0, 11))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_values_and_gradients(
    name: str, dtype: torch.dtype, tolerance: float, seed: int, choice: int, mode: int
) -> None:
    reference, variants = REFERENCES[name]
    args = [{}, *variants][choice % (len(variants) + 1)]
    modes = modes_of(name)
    case = with_peers(case_of(seed, modes[mode % len(modes)], dtype), name, args)
    loss, gradient = gradient_of(name, case, args)
    sg = case.rows("logprobs")
    assert float(loss) == pytest.approx(reference(case, sg, sg, **args), abs=tolerance, rel=tolerance)
    expected = slopes(lambda lp: reference(case, lp, sg, **args), sg)
    for row, flags, wanted in zip(gradient, case.x.mask, expected, strict=True):
        assert row[flags > 0].tolist() == pytest.approx(wanted, abs=tolerance, rel=tolerance)
        assert not row[flags == 0].any()


@pytest.mark.parametrize("name", REFERENCES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_token_is_marked_as_clipped_where_the_loss_learns_nothing_from_it(name: str, seed: int) -> None:
    args = {"rec": {"clip_mode": "two-side"}}.get(name, {})
    case = with_peers(case_of(seed, modes_of(name)[0]), name, args)
    loss, clipped = loss_and_clipped(name, case, args)
    assert (clipped is not None) == (name in HARD_CLIPS or name in ("cispo", "mix", "mix_chord"))
    if clipped is None or name not in HARD_CLIPS:
        return
    (gradient,) = torch.autograd.grad(loss, case.x.logprobs)
    taught = (case.x.mask > 0) & (case.x.advantages != 0)
    assert (clipped[taught] == (gradient[taught] == 0)).all()


def test_cispo_marks_tokens_that_it_trains_with_a_clipped_weight() -> None:
    counts: Counter[bool] = Counter()
    for seed in range(20):
        case = case_of(seed, "token-mean")
        x, ratio = case.x, (case.x.logprobs - case.x.old_logprobs).detach().exp()
        found = {name: loss_and_clipped(name, case, {})[1] for name in ("cispo", "ppo", "mix")}
        wide = {"clip_range_low": 2.0, "clip_range_high": 99.0, "enable_mask_clip": True, "mask_clip_range_low": 0.2}
        found["wide"] = loss_and_clipped("cispo", case, wide)[1]
        outside = ((ratio > 1.28) & (x.advantages > 0)) | ((ratio < 0.8) & (x.advantages < 0))
        rolled_out = (x.mask > 0) & (x.expert == 0)
        marks = {name: None if one is None else one[rolled_out].tolist() for name, one in found.items()}
        assert marks["cispo"] == (ratio > 1.28)[rolled_out].tolist()
        assert marks["wide"] == outside[rolled_out].tolist()
        assert marks["mix"] == marks["ppo"]
        counts.update(mark for marked in marks.values() for mark in marked or ())
    assert min(counts[True], counts[False]) > 20


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
    batch = WholeBatch([torch.ones(2, dtype=torch.bool)] * 4, ratios, ratios, advantages, None, [0] * 4, [0] * 4, 1)
    kept = m2po.keep(batch, m2_threshold=0.05)
    assert [row.tolist() for row in kept] == [[True, True]] + [[False, True]] * 3, "0.04 fits, and is the bound"
    assert all(row.all() for row in m2po.keep(batch, m2_threshold=0.2)), "the mean of all squares is 0.16"
    masked = m2po.keep(replace(batch, masks=[torch.tensor([False, True])] * 4), m2_threshold=0.05)
    assert [row.tolist() for row in masked] == [[False, True]] * 4
    assert m2po.keep(WholeBatch([], [], [], [], None, [], [], 1), m2_threshold=0.05) == []


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
