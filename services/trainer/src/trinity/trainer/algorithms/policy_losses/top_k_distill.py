"""The distance to a teacher's distribution in the place of each response token, over its k likeliest tokens."""

import math
from typing import Annotated

import torch
from pydantic import Field

from trinity.plugins import Fraction, algorithm, policy_loss
from trinity.plugins.arguments import MOST_TOP_TOKENS
from trinity.trainer.algorithms.aggregation import Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LossInputs

_MOST = -1e-7  # log of the largest sum of k probabilities: the others' keep a logarithm and a bounded gradient


@policy_loss("top_k_distill", source="GKD, arXiv:2306.13649, eq. 3", traits=["teacher_top"])
def top_k_distill(
    x: LossInputs,
    share: Share,
    *,
    top_k: Annotated[int, Field(ge=1, le=MOST_TOP_TOKENS)] = 16,
    beta: Fraction = 0.5,
) -> tuple[torch.Tensor, Report]:
    """JSD_b(P || Q) of the teacher's P and the policy's Q over the teacher's top_k tokens and one bucket of all others.

    JSD_b = b KL(P || M) + (1 - b) KL(Q || M), M = b P + (1 - b) Q, b = beta. b = 0 is the forward KL(P || Q), the limit
    of JSD_b / b, and b = 1 the reverse KL(Q || P), that of JSD_b / (1 - b). The bucket has the probability that the
    tokens leave, at least 1e-7, so the loss is at most the divergence of the whole distributions, and equal to it if
    top_k is the vocabulary. It is differentiated through all of Q, at temperature 1.
    """
    top, teacher = x.top_logprobs, x.teacher_top
    if top is None or teacher is None:  # a micro-batch without tokens to train
        top = x.logprobs[..., None]
        teacher = torch.zeros_like(top)
    p, q = _with_others(teacher), _with_others(top)
    if beta == 0:
        values = _kl(p, q)
    elif beta == 1:
        values = _kl(q, p)
    else:
        m = torch.logaddexp(p + math.log(beta), q + math.log(1 - beta))
        values = beta * _kl(p, m) + (1 - beta) * _kl(q, m)
    report = {
        "distill_loss": masked_sum(values.detach(), x.mask),
        "teacher_top_mass": masked_sum(1 - p[..., -1].exp(), x.mask),
    }
    return share(values, x.mask), report


def _with_others(logprobs: torch.Tensor) -> torch.Tensor:
    """Appends the log-probability of all other tokens: [B, R, k] -> [B, R, k + 1]."""
    known = logprobs.logsumexp(-1, keepdim=True).clamp(max=_MOST)
    return torch.cat([logprobs, (-known.expm1()).log()], -1)


def _kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(one || other) of log-probabilities over the last dimension."""
    return (one.exp() * (one - other)).sum(-1)


algorithm(
    "top_k_distill",
    policy_loss="top_k_distill",
    repeat_times=8,
    note="Needs a teacher: a model with the policy's tokenizer in explorer.auxiliary_models, or the policy itself.",
)
