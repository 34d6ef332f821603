"""The policy gradient with the ratio as it is."""

import torch

from trinity.trainer.algorithms.aggregation import Share
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.policy_losses.ratios import log_ratio
from trinity.trainer.algorithms.report import Report, masked_sum


def importance_sampling(x: LossInputs, share: Share) -> tuple[torch.Tensor, Report]:
    """-A r. PPO, arXiv:1707.06347, equation 6."""
    ratio = log_ratio(x).exp()
    return share(-x.advantages * ratio, x.mask), {"ratio": masked_sum(ratio.detach(), x.mask)}
