"""Weights and masks for off-policy tokens against plain loops, on top of losses; and the mismatch that is measured."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.config.algorithms import resolve
from trinity.config.schema.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from trinity.data.experience import Experience, VersionSpan
from trinity.trainer.algorithms.aggregation import Totals, means
from trinity.trainer.algorithms.correction import correct
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.loss import compute_loss, mismatch
from trinity.trainer.data.batch import _wholly_by

pytestmark = pytest.mark.core

CHOICES: list[dict[str, Any]] = [
    {"token_cap": 1.2},
    {"sequence_cap": 1.1},
    {"token_range": (0.8, 1.25)},
    {"token_range": (0.5, 1.3), "token_cap": 1.3},
    {"geometric_range": (0.9, 1.1)},
    {"geometric_range": (0.8, 1.2), "sequence_cap": 1.5},
    {},
    {"decoupled": False},
    {"decoupled": True},
    {"decoupled": True, "token_cap": 2.0, "token_range": (0.5, 1.5), "geometric_range": (0.85, 1.2)},
]


def inputs_of(seed: int, proximal: bool, dtype: torch.dtype = torch.float64) -> LossInputs:
    """The last row is an expert's."""
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(2, 6)), int(rng.integers(1, 7))
    old = -rng.exponential(1.0, (rows, width)).astype(np.float32)
    new, near = (old + rng.normal(0, 0.2, (rows, width)).astype(np.float32) for _ in range(2))
    mask = rng.random((rows, width)) < 0.75
    expert = np.arange(rows) == rows - 1

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values).to(dtype)

    return LossInputs(
        logprobs=tensor(new).requires_grad_(),
        entropy=tensor(new * 0),
        mask=tensor(mask),
        old_logprobs=tensor(old),
        advantages=tensor(rng.normal(0, 1, (rows, 1)).repeat(width, 1)),
        proximal_logprobs=tensor(near) if proximal else None,
        on_policy_mask=tensor(rng.random((rows, width)) < 0.5),
        expert_B=tensor(expert),
    )


def around_proximal(choice: dict[str, Any], proximal: bool) -> bool:
    """Whether a loss compares with the weights at the step's start; with null the batch decides."""
    return bool(choice.get("decoupled", proximal))


def plain_weights(x: LossInputs, config: RolloutCorrectionConfig) -> list[list[float]]:
    """Of all tokens; only those of trained ones mean anything."""
    result = []
    for b, row in enumerate(x.proximal):
        log_rhos = [float(v) - float(o) for v, o in zip(row, x.old_logprobs[b], strict=True)]
        trained = [value for value, m in zip(log_rhos, x.mask[b], strict=True) if m]
        whole = 1.0
        if config.sequence_cap is not None:
            whole *= min(math.exp(sum(trained)), config.sequence_cap)
        if config.geometric_range is not None:
            geometric = math.exp(sum(trained) / max(len(trained), 1))
            whole *= config.geometric_range[0] <= geometric <= config.geometric_range[1]
        weights = []
        for log_rho in log_rhos:
            rho, weight = math.exp(log_rho), whole
            if config.token_cap is not None:
                weight *= min(rho, config.token_cap)
            if config.token_range is not None:
                weight *= config.token_range[0] <= rho <= config.token_range[1]
            weights.append(1.0 if x.expert[b] else weight)
        result.append(weights)
    return result


@pytest.mark.parametrize("choice", CHOICES)
@given(seed=st.integers(0, 10_000), proximal=st.booleans())
@settings(max_examples=50, deadline=None)
def test_weights(choice: dict[str, Any], seed: int, proximal: bool) -> None:
    x, config = inputs_of(seed, proximal), RolloutCorrectionConfig(**choice)
    corrected, weights, report = correct(x, config)
    assert torch.equal(corrected.old_logprobs, x.proximal if around_proximal(choice, proximal) else x.old_logprobs)
    if config == RolloutCorrectionConfig(decoupled=config.decoupled):  # nothing is weighed
        assert weights is None
        return
    assert weights is not None
    assert not weights.requires_grad
    expected = plain_weights(x, config)
    rolled_out = (x.mask * (1 - x.expert)).bool()
    for b, row in enumerate(weights.expand_as(x.mask)):
        for t, weight in enumerate(row):
            if x.mask[b, t]:
                assert float(weight) == pytest.approx(expected[b][t], abs=1e-9)
    total = sum(expected[b][t] for b, t in np.ndindex(*x.mask.shape) if rolled_out[b, t])
    assert report["correction/weight"].tolist() == pytest.approx([total, int(rolled_out.sum())], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name", ["ppo", "opmd"])
@given(seed=st.integers(0, 10_000), proximal=st.booleans())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_loss_is_weighed_token_by_token(
    name: str, choice: dict[str, Any], dtype: torch.dtype, tolerance: float, seed: int, proximal: bool
) -> None:
    """Decoupled PPO: sg(prox / old) max(-A r, -A clip(r)) with r = new / prox. OPMD: sg(prox / old) (-A lp)."""
    x = inputs_of(seed, proximal, dtype)
    config = AlgorithmConfig.model_validate({"policy_loss_fn": name, "kl_loss_fn": "none"})
    plan = replace(resolve(config), correction=RolloutCorrectionConfig(**choice))
    rolled_out = x.mask * (1 - x.expert)  # rows of a dataset are not for these losses
    count = int(rolled_out.sum())
    loss, _ = compute_loss(plan, x, Totals(count, len(x.mask)))
    around = x.proximal if around_proximal(choice, proximal) else x.old_logprobs
    weights, total = plain_weights(x, plan.correction), 0.0
    slopes = torch.zeros_like(x.mask)
    for b, t in np.ndindex(*x.mask.shape):
        if not rolled_out[b, t]:
            continue
        a, lp = float(x.advantages[b, t]), float(x.logprobs.detach()[b, t])
        r = math.exp(lp - float(around[b, t]))
        if name == "opmd":
            value, slope = -a * lp / 2, -a / 2
        else:
            value = max(-a * r, -a * min(max(r, 0.8), 1.2))
            slope = -a * r if -a * r >= value else 0.0
        total += weights[b][t] * value / count
        slopes[b, t] = weights[b][t] * slope / count
    assert float(loss.detach()) == pytest.approx(total, abs=tolerance, rel=tolerance)
    if count:
        (gradient,) = torch.autograd.grad(loss, x.logprobs)
        torch.testing.assert_close(gradient, slopes, atol=tolerance, rtol=tolerance)


def test_without_options_nothing_is_done_to_the_only_update_of_a_batch() -> None:
    x = inputs_of(1, False)
    assert correct(x, RolloutCorrectionConfig()) == (x, None, {})


def test_the_only_update_of_a_batch_has_its_ratio_to_stale_rollouts_and_is_clipped() -> None:
    """The YAML cannot decide it: a batch smaller than trainer.mini_batch_size is not split."""
    x = replace(inputs_of(1, False), mask=torch.ones_like(inputs_of(1, False).mask), expert_B=None)
    stale = replace(x, logprobs=(x.old_logprobs + 0.5).requires_grad_(), advantages=torch.ones_like(x.mask))
    totals, plan = Totals(x.mask.numel(), len(x.mask)), resolve(AlgorithmConfig(algorithm_type="dapo"))
    loss, report = compute_loss(plan, stale, totals)
    assert float(loss.detach()) == pytest.approx(-1.28), "clipped at 1.28, of a ratio of e^0.5"
    assert means(report)["pg_clipfrac"] == 1
    several = replace(stale, proximal_logprobs=stale.logprobs.detach())
    assert float(compute_loss(plan, several, totals)[0].detach()) == pytest.approx(-1.0)


def test_what_is_rejected_still_counts_in_the_mean() -> None:
    x = replace(inputs_of(5, False), expert_B=None)
    plan = resolve(AlgorithmConfig.model_validate({"policy_loss_fn": "opmd", "kl_loss_fn": "none"}))
    plan = replace(plan, correction=RolloutCorrectionConfig(token_range=(1e8, 1e9)))
    loss, report = compute_loss(plan, x, Totals(int(x.mask.sum()), 2))
    assert float(loss.detach()) == 0
    assert means(report)["correction/left_out"] == 1


@given(seed=st.integers(0, 10_000), proximal=st.booleans())
@settings(max_examples=50, deadline=None)
def test_kernels_and_staleness_are_measured_apart(seed: int, proximal: bool) -> None:
    x = inputs_of(seed, proximal)
    assert x.on_policy_mask is not None
    found = means(mismatch(x))
    for name, on_policy in (("kernel", True), ("stale", False)):
        gaps = [
            float(x.proximal[b, t]) - float(x.old_logprobs[b, t])
            for b, t in np.ndindex(*x.mask.shape)
            if x.mask[b, t] and not x.expert[b] and bool(x.on_policy_mask[b, t]) is on_policy
        ]
        if not gaps:
            assert f"mismatch/{name}_kl" not in found
            continue
        kl = sum(math.exp(gap) - 1 - gap for gap in gaps) / len(gaps)
        assert found[f"mismatch/{name}_kl"] == pytest.approx(kl, abs=1e-5)
        assert found[f"mismatch/{name}_ratio"] == pytest.approx(sum(map(math.exp, gaps)) / len(gaps), rel=1e-5)
        assert found[f"mismatch/{name}_logprob_diff"] == pytest.approx(sum(map(abs, gaps)) / len(gaps), abs=1e-5)


def test_tokens_of_the_version_the_trainer_holds() -> None:
    spans = (VersionSpan(2, 0, 3), VersionSpan(4, 3, 4), VersionSpan(5, 4, 6))
    tokens, mask = np.zeros(8, np.int32), np.ones(6, bool)
    experience = Experience(0, 0, tokens, 2, np.zeros(6, np.float32), mask, 0.0, spans)
    assert not _wholly_by(experience, 5).any()  # it read keys and values of older weights
    assert _wholly_by(experience, 2).tolist() == [True] * 3 + [False] * 3
    assert not _wholly_by(experience, 3).any()
