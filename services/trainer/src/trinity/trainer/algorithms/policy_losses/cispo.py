"""CISPO: clips the weight of a token's gradient, not the token."""

import torch

from trinity.plugins import NonNegative, algorithm, policy_loss
from trinity.trainer.algorithms.aggregation import CLIPPED, Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LossInputs, log_ratio


@policy_loss("cispo", source="MiniMax-M1, arXiv:2506.13585, eq. 4 and 5", traits=["ratio"])
def cispo(
    x: LossInputs,
    share: Share,
    *,
    clip_range_low: NonNegative = 1.0,
    clip_range_high: NonNegative = 0.28,
    enable_mask_clip: bool = False,
    mask_clip_range_low: NonNegative = 1.0,
    mask_clip_range_high: NonNegative = 0.28,
) -> tuple[torch.Tensor, Report]:
    """-A sg(clip(r, 1 - low, 1 + high)) lp. Every token is trained.

    enable_mask_clip: 0 where PPO would clip, r > 1 + mask_high and A > 0, or r < 1 - mask_low and A < 0. That is its
    unified form, equations 6 and 7.
    """
    ratio = log_ratio(x).exp().detach()
    weight = ratio.clamp(1 - clip_range_low, 1 + clip_range_high)
    loss = -x.advantages * weight * x.logprobs
    clipped = weight != ratio
    report = {"pg_clipfrac": masked_sum(clipped, x.mask), "ratio": masked_sum(ratio, x.mask)}
    if enable_mask_clip:
        above = (ratio > 1 + mask_clip_range_high) & (x.advantages > 0)
        outside = above | ((ratio < 1 - mask_clip_range_low) & (x.advantages < 0))
        loss = loss.masked_fill(outside, 0.0)
        report["masked"] = masked_sum(outside, x.mask)
        clipped = clipped | outside
    return share(loss, x.mask), report | {CLIPPED: clipped}


algorithm("cispo", policy_loss="cispo", advantage="grpo", kl_loss="k2", entropy_loss="default")
