"""The distance to a teacher as the advantage. Each experience has `teacher_logprobs`, [R] numbers.

t and s: log-probabilities of the sampled token under the teacher and under the sampling policy.
"""

import math

import torch

from trinity.plugins import Fraction, NonNegative, Positive, advantage, algorithm
from trinity.runtime.errors import InvalidInput
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, by_token
from trinity.trainer.algorithms.inputs import LIMIT


@advantage("on_policy_distill", source="after arXiv:2306.13649", traits=["teacher"])
def on_policy_distill(rollouts: Rollouts, *, kl_coef: NonNegative = 1.0) -> Advantages:
    """kl_coef (t - s) at each token. The reverse KL's gradient."""
    values = [kl_coef * (t - s) for t, s in (_both(rollouts, index) for index in range(len(rollouts)))]
    return by_token(rollouts, values)


@advantage("jsd", source="GKD, arXiv:2306.13649, 2", traits=["teacher"])
def jsd(
    rollouts: Rollouts, *, kl_coef: NonNegative = 1.0, lambda_coef: Fraction = 0.5, temperature: Positive = 1.0
) -> Advantages:
    """-kl_coef times the gradient of the generalized Jensen-Shannon divergence JSD_b.

    JSD_b = b KL(P_t || M) + (1 - b) KL(P_s || M), M = b P_t + (1 - b) P_s, b = lambda_coef. Its gradient is the mean,
    over tokens that the student samples, of (1 - b) (s - log M) times the gradient of s: all other terms that depend on
    the student add up to a constant. 1 - b and s - log M are functions of t - s. b = 0 is KL(P_t || P_s), the limit
    of JSD_b / b, and b = 1 is KL(P_s || P_t), that of JSD_b / (1 - b), the advantage of `on_policy_distill`.

    temperature T: (t - s) / T replaces t - s. With T other than 1 the gradient is that of another f-divergence,
    which is 0 at P_s = P_t as well.
    """
    values = []
    for index in range(len(rollouts)):
        t, s = _both(rollouts, index)
        values.append(kl_coef * _jsd((t - s) / temperature, lambda_coef))
    return by_token(rollouts, values)


def _jsd(distance: torch.Tensor, b: float) -> torch.Tensor:
    """(1 - b) log(1 - b + b exp(distance)), or its limits over b and over 1 - b."""
    if b == 0:
        return distance.clamp(max=LIMIT).expm1()
    if b == 1:
        return distance
    return (1 - b) * torch.logaddexp(distance + math.log(b), torch.full_like(distance, math.log(1 - b)))


def _both(rollouts: Rollouts, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Teacher's and sampler's log-probabilities of the action tokens. Raises InvalidInput without a teacher's."""
    mask = rollouts.masks[index]
    found = rollouts.teachers[index] if rollouts.teachers is not None else None
    if found is None and not mask.any():  # a prompt that was cut
        found = torch.zeros(len(mask))
    if found is None or len(found) != len(mask):
        problem = "is missing" if found is None else f"has {len(found)} numbers, the response has {len(mask)} tokens"
        what = f"{problem}; group {int(rollouts.groups_N[index])}. The workflow records them, as on_policy_distill does"
        raise InvalidInput("experience.teacher_logprobs", what)
    return found[mask].to(torch.float64), rollouts.logprobs[index][mask].to(torch.float64)


_TEACHER = "Needs a teacher: a model with the policy's tokenizer in explorer.auxiliary_models."
algorithm("on_policy_distill", policy_loss="ppo", advantage="on_policy_distill", repeat_times=8, note=_TEACHER)
algorithm("jsd", policy_loss="ppo", advantage="jsd", repeat_times=8, note=_TEACHER)
