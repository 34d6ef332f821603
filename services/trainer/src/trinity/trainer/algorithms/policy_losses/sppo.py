"""sPPO: the log-ratio in place of the ratio, inside a symmetric range."""

import torch

from trinity.trainer.algorithms.aggregation import Share
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.policy_losses.ratios import log_ratio
from trinity.trainer.algorithms.report import Report, masked_sum


def sppo(x: LossInputs, share: Share, *, epsilon: float = 0.3) -> tuple[torch.Tensor, Report]:
    """-A (lp - lo) where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0. Trinity-RFT's sPPO, arXiv:2505.17826."""
    exponent = log_ratio(x)
    ratio = exponent.detach().exp()
    inside = (ratio >= 1 / (1 + epsilon)) & (ratio <= 1 + epsilon)
    report = {"pg_clipfrac": masked_sum(~inside, x.mask), "ratio": masked_sum(ratio, x.mask)}
    return share(-x.advantages * exponent * inside, x.mask), report
