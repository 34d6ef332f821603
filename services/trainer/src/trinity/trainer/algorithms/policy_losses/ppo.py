"""PPO's clipped surrogate."""

from typing import Annotated

import torch
from pydantic import Field

from trinity.plugins import NonNegative, policy_loss
from trinity.trainer.algorithms.aggregation import CLIPPED, Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LossInputs, bounds, clipped, log_ratio, sequence_mean


@policy_loss(
    "ppo",
    source="arXiv:1707.06347, eq. 7; dual clip, arXiv:1912.09729, eq. 5; clip-higher: DAPO, arXiv:2503.14476, eq. 10",
    traits=["ratio"],
)
def ppo(
    x: LossInputs,
    share: Share,
    *,
    clip_range: NonNegative | None = 0.2,
    clip_range_low: NonNegative | None = None,
    clip_range_high: NonNegative | None = None,
    clip_ratio_c: Annotated[float, Field(ge=1)] = 3.0,
    enable_sequence_masking: bool = False,
    delta_sequence_masking: NonNegative = 0.1,
    fallback_to_policy_gradient: bool = False,
) -> tuple[torch.Tensor, Report]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 at most -A c.

    `clip_range` replaces bounds that are None. enable_sequence_masking: tokens with
    A < 0 of sequences whose mean of lo - lp is above delta_sequence_masking have loss 0, and still count in means
    (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). fallback_to_policy_gradient: sg(lp) replaces lo, so that r is 1,
    nothing is clipped or masked, and the gradient is that of -A lp.
    """
    low, high = bounds(clip_range, clip_range_low, clip_range_high)
    exponent = x.logprobs - x.logprobs.detach() if fallback_to_policy_gradient else log_ratio(x)
    ratio = exponent.exp()
    upper, by_clip = clipped(x.advantages, ratio, low, high)
    bound, negative = -x.advantages * clip_ratio_c, x.advantages < 0
    by_bound = (upper > bound) & negative
    loss = torch.where(negative, torch.minimum(upper, bound), upper)
    report = {CLIPPED: by_clip | by_bound}
    if enable_sequence_masking:
        far = sequence_mean(-exponent.detach(), x.mask) > delta_sequence_masking
        loss = loss.masked_fill(negative & far[:, None], 0.0)
        report["sequence_masked"] = masked_sum(negative & far[:, None], x.mask)
    with torch.no_grad():
        report |= {
            "pg_clipfrac": masked_sum(by_clip, x.mask),
            "pg_clipfrac_lower": masked_sum(by_bound, x.mask),
            "ppo_kl": masked_sum(-exponent, x.mask),
            "ratio": masked_sum(ratio, x.mask),
        }
    return share(loss, x.mask), report
