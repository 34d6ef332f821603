"""The policy gradient with an unclipped ratio."""

import torch

from trinity.plugins import policy_loss
from trinity.trainer.algorithms.aggregation import Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LossInputs, log_ratio


@policy_loss("importance_sampling", source="PPO, arXiv:1707.06347, eq. 6", traits=["ratio"])
def importance_sampling(x: LossInputs, share: Share) -> tuple[torch.Tensor, Report]:
    """-A r."""
    ratio = log_ratio(x).exp()
    return share(-x.advantages * ratio, x.mask), {"ratio": masked_sum(ratio.detach(), x.mask)}
