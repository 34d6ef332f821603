"""SAPO: a soft gate replaces the clip."""

import torch

from trinity.plugins import Positive, algorithm, policy_loss
from trinity.trainer.algorithms.aggregation import Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LossInputs, log_ratio


@policy_loss("sapo", source="arXiv:2511.20347", traits=["ratio"], aggregation="seq-mean-token-mean")
def sapo(
    x: LossInputs, share: Share, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05
) -> tuple[torch.Tensor, Report]:
    """-A f(r), f(r) = sigmoid(tau (r - 1)) 4 / tau, tau is tau_pos for A > 0 and tau_neg else.

    f itself is differentiated: at r = 1 the gradient is that of -A r, and it fades on both sides.
    """
    ratio = log_ratio(x).exp()
    tau = torch.where(x.advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    report = {"ratio": masked_sum(ratio.detach(), x.mask)}
    return share(-x.advantages * gate, x.mask), report


algorithm("sapo", policy_loss="sapo", advantage="grpo", kl_loss="k2", entropy_loss="default")
