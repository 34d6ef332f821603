"""sPPO: the log-ratio replaces the ratio, inside a symmetric range."""

import torch

from trinity.plugins import NonNegative, algorithm, policy_loss
from trinity.trainer.algorithms.aggregation import CLIPPED, Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LossInputs, log_ratio


@policy_loss("sppo", source="Trinity-RFT, arXiv:2505.17826")
def sppo(x: LossInputs, share: Share, *, epsilon: NonNegative = 0.3) -> tuple[torch.Tensor, Report]:
    """-A (lp - lo) where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0."""
    exponent = log_ratio(x)
    ratio = exponent.detach().exp()
    inside = (ratio >= 1 / (1 + epsilon)) & (ratio <= 1 + epsilon)
    clipped = ~inside
    report = {
        CLIPPED: clipped,
        "pg_clipfrac": masked_sum(clipped, x.mask),
        "ratio": masked_sum(ratio, x.mask),
    }
    return share(-x.advantages * exponent * inside, x.mask), report


algorithm("sppo", policy_loss="sppo", advantage="opmd")
