"""KL estimators against their formulas, in loss and in reward, and the controller of their coefficient."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.config.algorithms import AlgorithmPlan, Part, resolve
from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.plugins.declarations import KL_FUNCTIONS
from trinity.trainer.algorithms.aggregation import Totals
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.kl import KlCoefficients, adapted
from trinity.trainer.algorithms.loss import compute_loss
from trinity.trainer.data.batch import TrainBatch, TrainSequence
from trinity.trainer.engine.whole_batch import apply_kl_penalty

pytestmark = pytest.mark.core

FORMULAS = {
    "k1": lambda lp, ref, old: lp - ref,
    "k2": lambda lp, ref, old: (lp - ref) ** 2 / 2,
    "k3": lambda lp, ref, old: math.exp(ref - lp) - 1 - (ref - lp),
    "low_var_kl": lambda lp, ref, old: min(10.0, math.exp(min(20.0, ref - lp)) - 1 - min(20.0, ref - lp)),
    "abs": lambda lp, ref, old: abs(lp - ref),
    "corrected_k3": lambda lp, ref, old: min(2.0, math.exp(lp - old)) * (math.exp(ref - lp) - 1 - (ref - lp)),
}


def numbers(seed: int) -> list[torch.Tensor]:
    """lp, ref, old: [B, R] float64."""
    return list(-torch.tensor(np.random.default_rng(seed).exponential(1.2, (3, 3, 5))))


def test_every_name_has_a_formula() -> None:
    assert set(FORMULAS) == set(KL_FUNCTIONS) - {"none"}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_values_and_gradients(name: str, dtype: torch.dtype, tolerance: float, seed: int) -> None:
    lp, ref, old = (values.to(dtype) for values in numbers(seed))
    lp.requires_grad_()
    found = KL_FUNCTIONS[name](lp, ref, old)
    (gradient,) = torch.autograd.grad(found.sum(), lp)
    step, formula = 1e-6, FORMULAS[name]
    for index in np.ndindex(*lp.shape):
        point = [float(values.detach()[index]) for values in (lp, ref, old)]
        assert float(found.detach()[index]) == pytest.approx(formula(*point), abs=tolerance, rel=tolerance)
        slope = (formula(point[0] + step, *point[1:]) - formula(point[0] - step, *point[1:])) / (2 * step)
        assert float(gradient[index]) == pytest.approx(slope, abs=tolerance, rel=tolerance)


@pytest.mark.parametrize(("spread", "exact"), [(0.1, True), (2.0, False)])
def test_corrected_k3_is_the_kl_as_long_as_its_cap_holds_nothing_back(spread: float, exact: bool) -> None:
    """Over a whole vocabulary, sampled by other weights: value and gradient are those of KL(policy || reference)."""
    policy, reference, shift = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = policy.clone().requires_grad_()
    lp, ref, old = logits.log_softmax(0), reference.log_softmax(0), (policy + spread * shift).log_softmax(0)
    wanted = (lp.exp() * (lp - ref)).sum()
    found = (old.exp() * KL_FUNCTIONS["corrected_k3"](lp, ref, old)).sum()
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, wanted)]
    assert (float((lp - old).detach().exp().max()) <= 2) == exact
    assert torch.allclose(*gradients, atol=1e-12) == exact
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), abs=1e-12) or (not exact and found < wanted)


def plan_of(**changes: object) -> AlgorithmPlan:
    return resolve(AlgorithmConfig.model_validate({"algorithm_type": "grpo", "repeat_times": 2, **changes}))


def test_in_the_loss_it_is_added_over_the_global_batch() -> None:
    lp, ref, old = numbers(1)
    mask = torch.ones_like(lp)
    mask[0, 2:] = 0
    ref = torch.where(mask > 0, ref, torch.tensor(900.0, dtype=ref.dtype))  # exp of it is infinite
    inputs = LossInputs(lp, torch.zeros_like(lp), mask, old, torch.zeros_like(lp), reference_logprobs=ref)
    totals = Totals(int(mask.sum()), 3)
    for coefficient, given_ in ((0.3, None), (0.7, 0.7)):
        plan = plan_of(kl_loss_fn="k3", kl_loss_fn_args={"kl_coef": 0.3})
        loss, report = compute_loss(plan, inputs, totals, given_)
        terms = [FORMULAS["k3"](float(lp[i]), float(ref[i]), 0.0) for i in np.ndindex(3, 5) if mask[i]]
        assert float(loss) == pytest.approx(coefficient * sum(terms) / len(terms))
        assert report["kl_loss"].tolist() == pytest.approx([sum(terms), len(terms)])
    assert float(compute_loss(plan_of(kl_loss_fn="none"), inputs, totals)[0]) == 0


@pytest.mark.parametrize("rows", ["experts", "offline"])
def test_rows_of_datasets_have_no_ratio_to_what_sampled(rows: str) -> None:
    """Nothing sampled them: their old log-probabilities are zeros, and k3 is not weighed."""
    lp, ref, old = numbers(2)
    lp.requires_grad_()
    experts = torch.tensor([0.0, 0.0, 1.0], dtype=lp.dtype) if rows == "experts" else torch.zeros(3, dtype=lp.dtype)
    of_dataset = torch.ones(3, dtype=torch.bool) if rows == "offline" else experts > 0
    old = torch.where(of_dataset[:, None], torch.zeros_like(old), old)
    mask, pairs = torch.ones_like(lp), torch.tensor([1.0, -1.0, 0.0], dtype=lp.dtype)
    inputs = LossInputs(lp, torch.zeros_like(lp), mask, old, torch.zeros_like(lp), reference_logprobs=ref,
                        expert_B=experts, pairs_B=pairs, peers_B=torch.zeros(3, dtype=lp.dtype))  # fmt: skip
    name = "mix" if rows == "experts" else "dpo"
    plan = replace(plan_of(algorithm_type=name, kl_loss_fn="corrected_k3"), offline=rows == "offline")
    totals = Totals(15, 3, pairs=1)
    if rows == "experts":
        totals = replace(totals, rolled_out=Totals(10, 2), expert=Totals(5, 1))
    with_kl, report = compute_loss(plan, inputs, totals, 1.0)
    (gradient,) = torch.autograd.grad(with_kl - compute_loss(plan, inputs, totals, 0.0)[0], lp)
    total, step = 0.0, 1e-6
    for b, t in np.ndindex(3, 5):
        formula = FORMULAS["k3" if of_dataset[b] else "corrected_k3"]
        point, behind = float(lp.detach()[b, t]), (float(ref[b, t]), float(old[b, t]))
        total += formula(point, *behind)
        slope = (formula(point + step, *behind) - formula(point - step, *behind)) / (2 * step)
        assert float(gradient[b, t]) == pytest.approx(slope / 15, abs=1e-6)
    assert report["kl_loss"].tolist() == pytest.approx([total, 15])


def sequence(group: int, reward: float, old: list[float], mask: list[bool]) -> TrainSequence:
    tokens, logprobs = np.zeros(2 + len(old), np.int32), np.asarray(old, np.float32)
    return TrainSequence(tokens, 2, logprobs, np.asarray(mask, bool), group=group, reward=reward)


def test_in_the_reward_it_is_taken_from_every_token() -> None:
    plan = plan_of(algorithm_type="rloo", kl_penalty_fn="k2", kl_loss_fn="none")
    sequences = (
        sequence(0, 1.0, [-1.0, -2.0, -9.0], [True, True, False]),
        sequence(0, 0.5, [-0.5], [True]),
        sequence(0, 0.25, [], []),
    )
    reference = [np.array([-1.5, -1.0, -1.0]), np.array([-2.5]), np.zeros(0)]
    batch, kl = apply_kl_penalty(plan, TrainBatch(3, sequences), reference, 0.1)
    kls = [[0.5 * 0.5**2, 0.5 * 1.0], [0.5 * 4.0], []]
    returns = [1.0 - 0.1 * sum(kls[0]), 0.5 - 0.1 * sum(kls[1]), 0.25]
    mean = sum(returns) / 3
    assert [s.advantage for s in batch.sequences] == pytest.approx([1.5 * (r - mean) for r in returns])
    assert kl == pytest.approx((sum(kls[0]) / 2 + kls[1][0]) / 2), "the mean over sequences of their tokens' means"


def test_whether_the_reference_is_needed_follows_from_the_coefficients() -> None:
    assert plan_of().needs_reference
    assert not plan_of(kl_loss_fn="none").needs_reference
    assert not plan_of(kl_loss_fn_args={"kl_coef": 0}).needs_reference
    assert plan_of(kl_loss_fn="none", kl_penalty_fn="k1").needs_reference
    assert plan_of(algorithm_type="dpo", kl_loss_fn="none").needs_reference


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.1, 1.0), (0.11, 1 + 0.1 * 64 / 1000), (9.0, 1 + 0.2 * 64 / 1000), (0.0, 1 - 0.2 * 64 / 1000), (None, 1.0)],
)
def test_the_controller_moves_towards_its_target(kl: float | None, factor: float) -> None:
    args = {"kl_coef": 0.5, "adaptive": True, "target_kl": 0.1, "horizon": 1000}
    assert adapted(0.5, Part("k2", args), kl, 64) == pytest.approx(0.5 * factor)
    assert adapted(0.5, Part("k2", {**args, "adaptive": False}), kl, 64) == 0.5


def test_coefficients_of_loss_and_reward_are_apart() -> None:
    args = {"adaptive": True, "target_kl": 0.1, "horizon": 10}
    plan = plan_of(kl_loss_fn_args={**args, "kl_coef": 0.2}, kl_penalty_fn="k1", kl_penalty_fn_args={"kl_coef": 0.4})
    first = KlCoefficients.of(plan)
    assert first == KlCoefficients(0.2, 0.4)
    assert first.after(plan, 9.0, 9.0, 10) == KlCoefficients(pytest.approx(0.24), 0.4)  # type: ignore[arg-type]
    assert KlCoefficients.of(plan_of(kl_loss_fn="none")) == KlCoefficients(0.0, 0.0)
