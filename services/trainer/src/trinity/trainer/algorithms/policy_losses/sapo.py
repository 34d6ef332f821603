"""SAPO: a soft gate in place of the clip."""

import torch

from trinity.trainer.algorithms.aggregation import Share
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.policy_losses.ratios import log_ratio
from trinity.trainer.algorithms.report import Report, masked_sum


def sapo(x: LossInputs, share: Share, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> tuple[torch.Tensor, Report]:
    """-A f(r), f(r) = sigmoid(tau (r - 1)) 4 / tau, tau is tau_pos for A > 0 and tau_neg else. arXiv:2511.20347.

    f itself is differentiated: at r = 1 the gradient is that of -A r, and it fades on both sides.
    """
    ratio = log_ratio(x).exp()
    tau = torch.where(x.advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    report = {"ratio": masked_sum(ratio.detach(), x.mask)}
    return share(-x.advantages * gate, x.mask), report
