"""DPPO: leaves out tokens by the divergence of their probabilities, instead of their ratio."""

import torch

from trinity.plugins import Fraction, Positive, policy_loss
from trinity.trainer.algorithms.aggregation import CLIPPED, Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LossInputs, log_ratio


@policy_loss("dppo_tv", source="DPPO-Binary-TV, arXiv:2602.04879", traits=["ratio"])
def dppo_tv(
    x: LossInputs,
    share: Share,
    *,
    clip_range_low: Fraction = 0.2,
    clip_range_high: Fraction = 0.2,
    clip_ratio_c: Positive = 20.0,
) -> tuple[torch.Tensor, Report]:
    """-A sg(min(r, c)) lp where p - exp(lo) <= high for A > 0 and >= -low else, p = exp(lp); else 0.

    The ranges bound the total variation between the token and all others, which is |p - exp(lo)|.
    """
    moved = x.logprobs.detach().exp() - x.old_logprobs.exp()
    inside = torch.where(x.advantages > 0, moved <= clip_range_high, moved >= -clip_range_low)
    return _of_tokens(x, share, inside, clip_ratio_c)


@policy_loss("dppo_kl", source="DPPO-Binary-KL, arXiv:2602.04879", traits=["ratio"])
def dppo_kl(
    x: LossInputs,
    share: Share,
    *,
    clip_range_low: Fraction = 0.2,
    clip_range_high: Fraction = 0.2,
    clip_ratio_c: Positive = 20.0,
) -> tuple[torch.Tensor, Report]:
    """-A sg(min(r, c)) lp, but 0 where p > q, A > 0 and KL > high, and where p < q, A <= 0 and KL > low; q = exp(lo).

    KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), between the token and all others.
    """
    log_p, log_q = x.logprobs.detach(), x.old_logprobs
    others_p, others_q = -torch.expm1(log_p), -torch.expm1(log_q)
    kl = log_q.exp() * (log_q - log_p) + torch.xlogy(others_q, others_q) - torch.xlogy(others_q, others_p)
    above = (log_p > log_q) & (kl > clip_range_high)
    below = (log_p < log_q) & (kl > clip_range_low)
    return _of_tokens(x, share, ~torch.where(x.advantages > 0, above, below), clip_ratio_c)


def _of_tokens(x: LossInputs, share: Share, inside: torch.Tensor, most: float) -> tuple[torch.Tensor, Report]:
    ratio = log_ratio(x).exp().detach()
    loss = -x.advantages * ratio.clamp(max=most) * x.logprobs * inside
    clipped = ~inside
    report = {
        CLIPPED: clipped,
        "pg_clipfrac": masked_sum(clipped, x.mask),
        "ratio": masked_sum(ratio, x.mask),
    }
    return share(loss, x.mask), report
