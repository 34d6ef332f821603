"""M2PO: a clip whose width follows from the second moment of the batch's log-ratios."""

from typing import Any

import torch

from trinity.plugins import NonNegative, Positive, algorithm, policy_loss
from trinity.trainer.algorithms.aggregation import CLIPPED, Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LossInputs, WholeBatch, log_ratio


def keep(batch: WholeBatch, *, m2_threshold: float, **_: Any) -> list[torch.Tensor]:
    """Tokens that are kept, bool [R] for each sequence, from all sequences of the batch.

    Tokens are left out only where PPO's clip might act (A > 0 and lp > lo, or A < 0 and lp < lo), and only if the mean
    of their (lp - lo)^2 is above m2_threshold: then those with (lp - lo)^2 >= t, the largest of these squares with a
    mean of min((lp - lo)^2, t) <= m2_threshold. This follows the authors' code (github.com/Infini-AI-Lab/M2PO), which
    clips just inside exp(+-sqrt(t)). Algorithm 1 of the paper takes the mean over the kept tokens, and keeps more.
    """
    if not batch.masks:
        return []
    ratios, signs, mask = torch.cat(batch.log_ratios), torch.cat(batch.advantages), torch.cat(batch.masks)
    bounded = torch.nonzero(mask & (((signs > 0) & (ratios > 0)) | ((signs < 0) & (ratios < 0))))[:, 0]
    moments, order = ratios[bounded].square().sort(stable=True)
    beyond = torch.arange(len(moments) - 1, -1, -1)
    capped = moments.cumsum(0) + moments * beyond  # the sum of all, each capped at this one: it only grows
    count = int((capped <= m2_threshold * len(moments)).sum())
    kept = mask.clone()
    if count < len(moments):
        outside = moments >= moments[count - 1] if count else torch.ones_like(moments, dtype=torch.bool)
        kept[bounded[order[outside]]] = False
    return list(kept.split([len(m) for m in batch.masks]))


@policy_loss(
    "m2po", source="arXiv:2510.01161, and its authors' code", traits=["ratio"], aggregations=["token-mean"], keep=keep
)
def m2po(
    x: LossInputs, share: Share, *, m2_threshold: NonNegative = 0.04, log_ratio_clip: Positive = 20.0
) -> tuple[torch.Tensor, Report]:
    """-A r for all tokens except those at which PPO's clip might act and (lp - lo)^2 >= t, the largest t with a mean of
    min((lp - lo)^2, t) <= m2_threshold over the batch; for all tokens if the mean of (lp - lo)^2 is not above it.

    log_ratio_clip bounds the value of lp - lo in r, not its gradient. The mean is over all tokens.
    """
    assert x.keep_mask is not None
    plain = x.logprobs - x.old_logprobs
    exponent = plain + (plain.clamp(-log_ratio_clip, log_ratio_clip) - plain).detach()
    clipped = x.keep_mask == 0
    loss = (-x.advantages * exponent.exp()).masked_fill(clipped, 0.0)
    report = {
        CLIPPED: clipped,
        "m2po_masked": masked_sum(clipped, x.mask),
        "second_moment": masked_sum(plain.detach().square() * x.keep_mask, x.mask),
        "ppo_kl": masked_sum(-log_ratio(x).detach(), x.mask),
    }
    return share(loss, x.mask), report


algorithm("m2po", policy_loss="m2po", advantage="grpo", repeat_times=8)
