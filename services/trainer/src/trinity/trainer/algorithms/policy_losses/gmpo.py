"""GMPO: the geometric mean of a sequence's ratios, each of them clipped."""

import torch

from trinity.plugins import NonNegative, policy_loss
from trinity.trainer.algorithms.aggregation import CLIPPED, Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LossInputs, log_ratio, sequence_mean


@policy_loss(
    "gmpo", source="arXiv:2507.20673", traits=["ratio", "sequences", "geometric"], aggregation="seq-mean-token-sum"
)
def gmpo(
    x: LossInputs, share: Share, *, clip_range_low: NonNegative = 0.4, clip_range_high: NonNegative = 0.4
) -> tuple[torch.Tensor, Report]:
    """-A exp(mean over the sequence of d), d = min(lp - lo, high) for A > 0 and max(lp - lo, -low) for A < 0.

    The clip is of log-ratios. A is the mean of the advantages of the sequence's tokens;
    a token whose advantage is 0 has d = 0. Weights of a correction count with their geometric mean, as in veRL.
    """
    exponent = log_ratio(x)
    above, below = exponent.clamp(max=clip_range_high), exponent.clamp(min=-clip_range_low)
    held = torch.where(x.advantages > 0, above, below) * (x.advantages != 0)
    ratio = sequence_mean(held, x.mask).exp()
    clipped = (held != exponent) & (x.advantages != 0)
    report = {
        CLIPPED: clipped,
        "pg_clipfrac": masked_sum(clipped, x.mask),
        "ppo_kl": masked_sum(-exponent.detach(), x.mask),
        "ratio": masked_sum(ratio.detach(), x.mask.sum(-1) > 0),
    }
    weighed = share.by_geometric_mean(x.mask)
    return weighed.of_sequences(-sequence_mean(x.advantages, x.mask) * ratio, x.mask), report
