"""Advantages of distillation are gradients of divergences: exactly, over every response of a small vocabulary."""

import itertools

import pytest
import torch

from trinity.plugins.declarations import ADVANTAGES as NAMES
from trinity.trainer.algorithms.advantages import Rollouts, compute
from trinity.trainer.algorithms.aggregation import Share, Totals
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.policy_losses.ppo import ppo

pytestmark = pytest.mark.core

TOKENS, LENGTH = 3, 2
RESPONSES = torch.tensor(list(itertools.product(range(TOKENS), repeat=LENGTH)))  # [9, 2]
# A tabular policy has one distribution for the first token and one for the second after each first.
PREFIX = torch.stack([torch.zeros(len(RESPONSES), dtype=torch.long), 1 + RESPONSES[:, 0]], 1)


def table(seed: int) -> torch.Tensor:
    return torch.randn(1 + TOKENS, TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens_of(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens of all responses, [9, 2]."""
    return logits.log_softmax(-1)[PREFIX, RESPONSES]


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p.log() - q.log())).sum(-1)


def divergence(student: torch.Tensor, teacher: torch.Tensor, b: float) -> torch.Tensor:
    """GKD's objective: summed over the tokens of a response, whose sampling has no gradient."""
    s, t = student.softmax(-1), teacher.softmax(-1)
    m = b * t + (1 - b) * s
    of_prefix = kl(t, s) if b == 0 else kl(s, t) if b == 1 else b * kl(t, m) + (1 - b) * kl(s, m)
    return of_prefix[0] + (s[0].detach() * of_prefix[1:]).sum()


def expected_gradient(student: torch.Tensor, teacher: torch.Tensor, name: str, args: dict[str, float]) -> torch.Tensor:
    """Of the trainer's advantage and PPO's loss, with each response weighed by the probability that it is sampled."""
    student = student.detach().requires_grad_()
    logprobs = tokens_of(student)
    sampled, every = logprobs.detach(), torch.ones(len(RESPONSES), LENGTH, dtype=torch.bool)
    rollouts = Rollouts(
        rewards_N=torch.zeros(len(RESPONSES), dtype=torch.float64),
        groups_N=torch.zeros(len(RESPONSES), dtype=torch.long),
        masks=list(every),
        logprobs=list(sampled),
        teachers=list(tokens_of(teacher)),
    )
    advantages = torch.stack(compute(name, {**NAMES[name].defaults, **args}, rollouts).tokens)
    ones = torch.ones_like(sampled)
    x = LossInputs(logprobs, torch.zeros_like(ones), ones, sampled, advantages)
    share = Share("seq-mean-token-sum", Totals(1, 1), weights=sampled.sum(-1, keepdim=True).exp())
    loss, _ = ppo(x, share)
    (gradient,) = torch.autograd.grad(loss, student)
    return gradient


@pytest.mark.parametrize("b", [0, 0.1, 0.5, 0.9, 1])
@pytest.mark.parametrize("seed", range(5))
def test_jsd_is_the_gradient_of_the_divergence(b: float, seed: int) -> None:
    student, teacher = table(seed).requires_grad_(), table(100 + seed)
    (wanted,) = torch.autograd.grad(divergence(student, teacher, b), student)
    found = expected_gradient(student, teacher, "jsd", {"lambda_coef": b})
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-9)


def test_distillation_is_jsd_at_the_student_s_end() -> None:
    student, teacher = table(1), table(2)
    found = expected_gradient(student, teacher, "on_policy_distill", {})
    torch.testing.assert_close(found, expected_gradient(student, teacher, "jsd", {"lambda_coef": 1}))


@pytest.mark.parametrize("b", [0, 0.5, 1])
def test_both_ends_are_limits(b: float) -> None:
    """JSD_b vanishes at 0 and at 1; over b, over 1 - b, it does not."""
    student, teacher, near = table(3), table(4), {0.0: 1e-7, 1.0: 1 - 1e-7}.get(b, b)
    scale = {0.0: near, 1.0: 1 - near}.get(b, 1.0)
    found = expected_gradient(student, teacher, "jsd", {"lambda_coef": near}) / scale
    torch.testing.assert_close(found, expected_gradient(student, teacher, "jsd", {"lambda_coef": b}), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("b", "temperature"), [(0, 1), (0.1, 1), (0.5, 2), (1, 1)])
def test_5000_exact_steps_reach_the_teacher(b: float, temperature: float) -> None:
    student, teacher = table(5), table(6)
    start = float(divergence(student, teacher, 0.5))
    rate = 2 * temperature / (b * (1 - b) or 1)  # near the teacher JSD_b is b (1 - b) of a KL
    for _ in range(5000):
        gradient = expected_gradient(student, teacher, "jsd", {"lambda_coef": b, "temperature": temperature})
        student = student - rate * gradient
    assert start > 0.1
    assert abs(float(divergence(student, teacher, 0.5))) < 1e-12
