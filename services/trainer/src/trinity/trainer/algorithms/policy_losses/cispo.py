"""CISPO: clips the weight of a token's gradient, not the token."""

import torch

from trinity.trainer.algorithms.aggregation import Share
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.policy_losses.ratios import log_ratio
from trinity.trainer.algorithms.report import Report, masked_sum


def cispo(
    x: LossInputs,
    share: Share,
    *,
    clip_range_low: float = 1.0,
    clip_range_high: float = 0.28,
    enable_masking: bool = True,
) -> tuple[torch.Tensor, Report]:
    """-A sg(clip(r, 1 - low, 1 + high)) M lp. MiniMax-M1, arXiv:2506.13585, equations 4 to 7.

    M is 0 where PPO would clip (r > 1 + high and A > 0, or r < 1 - low and A < 0), else 1: the paper's unified form.
    Without enable_masking M is 1 everywhere: its CISPO.
    """
    ratio = log_ratio(x).exp().detach()
    low, high = 1 - clip_range_low, 1 + clip_range_high
    outside = ((ratio > high) & (x.advantages > 0)) | ((ratio < low) & (x.advantages < 0))
    loss = -x.advantages * ratio.clamp(low, high) * x.logprobs
    if enable_masking:
        loss = loss.masked_fill(outside, 0.0)
    report = {"pg_clipfrac": masked_sum(outside, x.mask), "ratio": masked_sum(ratio, x.mask)}
    return share(loss, x.mask), report
