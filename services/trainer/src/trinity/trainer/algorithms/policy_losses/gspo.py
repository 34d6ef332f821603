"""GSPO: the ratio of a whole sequence."""

import torch

from trinity.plugins import NonNegative, algorithm, policy_loss
from trinity.trainer.algorithms.aggregation import CLIPPED, Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LIMIT, LossInputs, bounds, clipped, sequence_mean


@policy_loss("gspo", source="arXiv:2507.18071, 4.3", traits=["ratio"], aggregation="seq-mean-token-mean")
def gspo(
    x: LossInputs,
    share: Share,
    *,
    clip_range: NonNegative | None = None,
    clip_range_low: NonNegative | None = 3e-4,
    clip_range_high: NonNegative | None = 4e-4,
) -> tuple[torch.Tensor, Report]:
    """max(-A s, -A clip(s, 1 - low, 1 + high)) with s = exp(lp - sg(lp) + sg(mean over the sequence of lp - lo)).

    GSPO-token: if A is the same for all tokens of a sequence, and the aggregation is seq-mean-token-mean, value and
    gradient are GSPO's, whose ratio is exp(mean(lp - lo)). `clip_range` replaces a bound that is None.
    """
    mean = sequence_mean(x.logprobs.detach() - x.old_logprobs, x.mask).clamp(-LIMIT, LIMIT)
    ratio = (x.logprobs - x.logprobs.detach() + mean[:, None]).exp()
    loss, by_clip = clipped(x.advantages, ratio, *bounds(clip_range, clip_range_low, clip_range_high))
    report = {
        CLIPPED: by_clip,
        "pg_clipfrac": masked_sum(by_clip, x.mask),
        "ppo_kl": masked_sum(-(x.logprobs - x.old_logprobs).detach(), x.mask),
        "ratio": masked_sum(ratio.detach(), x.mask),
    }
    return share(loss, x.mask), report


algorithm("gspo", policy_loss="gspo", advantage="grpo", kl_loss="k2", entropy_loss="default")
