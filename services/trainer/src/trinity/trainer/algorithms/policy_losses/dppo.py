"""DPPO: tokens that have moved too far are left out by a divergence of their probabilities, not by their ratio."""

import torch

from trinity.plugins import Fraction, Positive, policy_loss
from trinity.trainer.algorithms.aggregation import Report, Share, masked_sum
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
    ratio = log_ratio(x).exp().detach()
    moved = x.logprobs.detach().exp() - x.old_logprobs.exp()
    inside = torch.where(x.advantages > 0, moved <= clip_range_high, moved >= -clip_range_low)
    loss = -x.advantages * ratio.clamp(max=clip_ratio_c) * x.logprobs * inside
    report = {"pg_clipfrac": masked_sum(~inside, x.mask), "ratio": masked_sum(ratio, x.mask)}
    return share(loss, x.mask), report
