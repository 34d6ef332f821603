"""TOPR: tapers negative samples by the probability that the policy still gives them."""

from typing import Literal

import torch

from trinity.plugins import algorithm, policy_loss
from trinity.trainer.algorithms.aggregation import Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LIMIT, LossInputs, log_ratio, sequence_sum


@policy_loss("topr", source="arXiv:2503.14286", traits=["ratio"])
def topr(
    x: LossInputs,
    share: Share,
    *,
    advantage_threshold: float = 0.0,
    ratio_level: Literal["token", "sequence"] = "token",
) -> tuple[torch.Tensor, Report]:
    """-sg(alpha) A lp, alpha = min(r, 1) where A <= advantage_threshold, else 1.

    The paper's ratio is of the whole response: ratio_level = sequence. `token` takes that of each token.
    """
    exponent = log_ratio(x).detach()
    if ratio_level == "sequence":
        exponent = sequence_sum(x.logprobs.detach() - x.old_logprobs, x.mask).clamp(-LIMIT, LIMIT)[:, None]
    tapered = x.advantages <= advantage_threshold
    alpha = torch.where(tapered, exponent.exp().clamp(max=1.0), 1.0)
    report = {"tapered": masked_sum(tapered, x.mask), "alpha": masked_sum(alpha, x.mask)}
    return share(-alpha * x.advantages * x.logprobs, x.mask), report


algorithm("topr", policy_loss="topr", advantage="reinforce", kl_loss="k2", entropy_loss="default")
