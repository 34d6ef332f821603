"""Losses, advantages, KL and entropy in Trinity-RFT's form: of a whole batch, however it is split."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.fakes.trinity_rft.loading import loaded
from trinity.config.algorithms import AlgorithmPlan, part_problems, resolvable, resolve
from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.trainer.algorithms.advantages import Rollouts, compute
from trinity.trainer.algorithms.aggregation import Totals, join, means
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.loss import compute_loss

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def _files() -> Iterator[None]:
    with loaded("algorithms"):
        yield


def plan(**changes: Any) -> AlgorithmPlan:
    config = AlgorithmConfig.model_validate({"algorithm_type": "faded_worst", "repeat_times": 4, **changes})
    assert resolvable(config) and not list(part_problems(config))
    return resolve(config)


def batch(rows: int = 5, length: int = 6) -> LossInputs:
    torch.manual_seed(3)
    mask = (torch.rand(rows, length) < 0.7).float()
    mask[1] = 0  # a sequence of which nothing is trained
    logprobs = -torch.rand(rows, length) - 0.1
    old, reference = logprobs + 0.2 * torch.randn(rows, length), logprobs + 0.1
    return LossInputs(
        logprobs.requires_grad_(), torch.rand(rows, length), mask, old, torch.randn(rows, length), reference
    )


def part(x: LossInputs, rows: slice) -> LossInputs:
    return LossInputs(
        *(getattr(x, n)[rows] for n in ("logprobs", "entropy", "mask", "old_logprobs", "advantages")),
        reference_logprobs=x.reference_logprobs[rows] if x.reference_logprobs is not None else None,
    )


def token_losses(x: LossInputs) -> torch.Tensor:
    ratio = (x.logprobs - x.old_logprobs).exp()
    gate = (-((ratio.detach() - 1) / 0.3).square()).exp()
    return -x.advantages * ratio * gate


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_a_loss_is_that_of_the_whole_batch_for_every_split(mode: str) -> None:
    chosen, x = plan(loss_agg_mode=mode, entropy_loss_fn_args={"entropy_coef": 0.1}), batch()
    tokens, sequences = int(x.mask.sum()), int((x.mask.sum(-1) > 0).sum())
    losses, reports = [], []
    for rows in (slice(0, 1), slice(1, 2), slice(2, 5)):
        loss, report = compute_loss(chosen, part(x, rows), Totals(tokens, sequences))
        losses.append(loss)
        reports.append(report)
    masked = token_losses(x) * x.mask
    assert x.reference_logprobs is not None
    squares = 0.5 * (x.logprobs - x.reference_logprobs).square() * x.mask
    lengths = x.mask.sum(-1).clamp(min=1)

    def mean(values: torch.Tensor) -> torch.Tensor:
        if mode == "token-mean":
            return values.sum() / tokens
        return ((values.sum(-1) / lengths) if mode.endswith("token-mean") else values.sum(-1)).sum() / sequences

    wanted = mean(masked) + 0.001 * mean(squares) - 0.1 * (x.entropy * x.mask).sum() / tokens
    total = torch.stack(losses).sum()
    torch.testing.assert_close(total, wanted)
    (gradient,) = torch.autograd.grad(total, x.logprobs, retain_graph=True)
    (expected,) = torch.autograd.grad(wanted, x.logprobs)
    torch.testing.assert_close(gradient, expected)
    ratio = (x.logprobs - x.old_logprobs).exp()
    gate = (-((ratio - 1) / 0.3).square()).exp()
    assert means(join(reports))["gate"] == pytest.approx(float((gate.detach() * x.mask).sum() / tokens), rel=1e-5)


def test_an_advantage_of_groups_leaves_sequences_out() -> None:
    masks = [torch.tensor([True, False, True]), torch.ones(1, dtype=torch.bool), torch.ones(2, dtype=torch.bool)]
    rewards = torch.tensor([1.0, 3.0, 3.5], dtype=torch.float64)
    rollouts = Rollouts(rewards, torch.tensor([0, 0, 1]), masks, [torch.zeros(len(m)) for m in masks])
    found = compute("above_worst", {"keep_worst": False}, rollouts)
    assert found.copies_N.tolist() == [0, 1, 0] and found.tokens[1].tolist() == [2.0]
    found = compute("above_worst", {"keep_worst": True}, rollouts)
    assert found.copies_N.tolist() == [1, 1, 1] and found.scores_N.tolist() == [0.0, 2.0, 0.0]
    assert found.tokens[0].tolist() == [0.0, 0.0, 0.0]


def test_the_algorithm_has_its_parts_and_their_arguments() -> None:
    chosen = plan()
    assert chosen.policy_loss.args == {"width": 0.3} and chosen.needs_reference
    assert chosen.advantage is not None and chosen.advantage.args == {"keep_worst": False}
    assert (chosen.kl_loss.name, chosen.entropy_loss.name) == ("half_square", "plain_entropy")
    assert plan(policy_loss_fn_args={"width": 0.9}).policy_loss.args == {"width": 0.9}


def test_a_correction_of_tokens_is_refused_with_a_loss_of_one_number() -> None:
    config = {"algorithm_type": "faded_worst", "repeat_times": 4, "rollout_correction": {"token_range": [0.5, 2.0]}}
    found = dict(part_problems(AlgorithmConfig.model_validate(config)))
    assert "faded is one number for all" in found["rollout_correction"]
