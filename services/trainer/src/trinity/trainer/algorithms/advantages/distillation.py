"""The distance to a teacher as the advantage. Each experience has its `teacher_logprobs`, [R] numbers.

t and s: log-probabilities of the sampled token under the teacher and under the policy that sampled it.
"""

import math

import torch

from trinity.runtime.errors import InvalidInput
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, by_token


def on_policy_distill(rollouts: Rollouts, *, kl_coef: float = 1.0) -> Advantages:
    """kl_coef (t - s) at each token: the reverse KL's gradient. After arXiv:2306.13649."""
    values = [kl_coef * (t - s) for t, s in (_both(rollouts, index) for index in range(len(rollouts)))]
    return by_token(rollouts, values)


def jsd(rollouts: Rollouts, *, kl_coef: float = 1.0, lambda_coef: float = 0.5) -> Advantages:
    """-kl_coef J at each token, the generalized Jensen-Shannon divergence's terms. After arXiv:2306.13649.

    J = b P_t (t - log M) + (1 - b) P_s (s - log M), M = b P_t + (1 - b) P_s, P = exp of the log-probabilities of the
    sampled token, b = lambda_coef. 0 for b outside (0, 1).
    """
    values = []
    for index in range(len(rollouts)):
        t, s = _both(rollouts, index)
        if not 0 < lambda_coef < 1:
            values.append(torch.zeros_like(s))
            continue
        mixture = torch.logaddexp(t + math.log(lambda_coef), s + math.log(1 - lambda_coef))
        divergence = lambda_coef * t.exp() * (t - mixture) + (1 - lambda_coef) * s.exp() * (s - mixture)
        values.append(-kl_coef * divergence)
    return by_token(rollouts, values)


def _both(rollouts: Rollouts, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Teacher's and sampler's log-probabilities of the action tokens. Raises InvalidInput without a teacher's."""
    mask = rollouts.masks[index]
    found = rollouts.teachers[index] if rollouts.teachers is not None else None
    if found is None or len(found) != len(mask):
        problem = "is missing" if found is None else f"has {len(found)} numbers, the response has {len(mask)} tokens"
        what = f"{problem}; group {int(rollouts.groups_N[index])}. The workflow records them, as on_policy_distill does"
        raise InvalidInput("experience.teacher_logprobs", what)
    return found[mask].to(torch.float64), rollouts.logprobs[index][mask].to(torch.float64)
