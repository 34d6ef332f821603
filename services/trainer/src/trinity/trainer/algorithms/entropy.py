"""Entropy terms: the mean entropy of trained tokens. The loss subtracts entropy_coef times this mean."""

import torch

from trinity.config.algorithms import Part
from trinity.plugins import entropy_loss
from trinity.plugins.declarations import ENTROPY_LOSSES
from trinity.trainer.algorithms.aggregation import Share
from trinity.trainer.algorithms.inputs import LossInputs


def mean_entropy(part: Part, x: LossInputs, share: Share) -> torch.Tensor:
    """Returns this micro-batch's share of the mean entropy by the part's function, a scalar."""
    found: torch.Tensor = ENTROPY_LOSSES[part.name](x, share, **part.args_beside(ENTROPY_LOSSES.args))
    return found


@entropy_loss("default", also=["basic"])
def default(x: LossInputs, share: Share) -> torch.Tensor:
    """Mean over all sequences."""
    return share(x.entropy, x.mask)


@entropy_loss("mix")
def mix(x: LossInputs, share: Share) -> torch.Tensor:
    """Mean over the rolled-out sequences."""
    return share.among(share.totals.rolled_out)(x.entropy, x.mask * (1 - x.expert))
