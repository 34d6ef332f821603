"""Clip-Cov and KL-Cov restrain the few tokens with the largest covariance, which reduce the entropy most.

The entropy mechanism of RL, arXiv:2505.22617. The covariance of a token is (A - mean of A) (lp - mean of lp), the means
over the tokens of the batch, under the weights before an update. x.keep_mask is 0 at the chosen tokens.
"""

from typing import Any

import numpy as np
import torch

from trinity.plugins import NonNegative, PositiveFraction, policy_loss
from trinity.trainer.algorithms.aggregation import CLIPPED, Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LossInputs, WholeBatch, bounds, clipped, log_ratio

Ragged = list[torch.Tensor]


def chosen_to_clip(
    batch: WholeBatch, *, clip_cov_ratio: float, clip_cov_lb: float, clip_cov_ub: float, **clip: Any
) -> Ragged:
    """Tokens that are kept, bool [R] for each sequence: all but clip_cov_ratio of the batch's (at least one).

    The others are drawn among tokens with a covariance between clip_cov_lb and clip_cov_ub at which PPO's clip does not
    act.
    """
    if not batch.masks:
        return []
    mask, covariance = _covariances(batch)
    low, high = bounds(clip["clip_range"], clip["clip_range_low"], clip["clip_range_high"])
    _, by_clip = clipped(torch.cat(batch.advantages), torch.cat(batch.log_ratios).exp(), low, high)
    inside = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & mask & ~by_clip
    candidates = torch.nonzero(inside)[:, 0]
    count = max(int(clip_cov_ratio * int(mask.sum())), 1)
    drawn = np.random.default_rng(batch.seed).permutation(len(candidates))[:count]
    return _without(mask, candidates[torch.from_numpy(drawn)], batch.masks)


def chosen_to_hold(batch: WholeBatch, *, kl_cov_ratio: float, **_: Any) -> Ragged:
    """Tokens that are kept: all but the kl_cov_ratio of the batch's (at least one) with the largest covariance."""
    if not batch.masks:
        return []
    mask, covariance = _covariances(batch)
    count = max(int(kl_cov_ratio * int(mask.sum())), 1) if mask.any() else 0
    order = covariance.masked_fill(~mask, -torch.inf).sort(descending=True, stable=True).indices
    return _without(mask, order[:count], batch.masks)


def _covariances(batch: WholeBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask and covariances of all tokens of all sequences, [all R]."""
    mask, lp, a = torch.cat(batch.masks), torch.cat(batch.logprobs), torch.cat(batch.advantages)
    count = max(int(mask.sum()), 1)
    return mask, (a - a[mask].sum() / count) * (lp - lp[mask].sum() / count)


def _without(mask: torch.Tensor, places: torch.Tensor, masks: Ragged) -> Ragged:
    kept = mask.clone()
    kept[places] = False
    return list(kept.split([len(m) for m in masks]))


@policy_loss("clip_cov", source="arXiv:2505.22617", traits=["ratio"], keep=chosen_to_clip)
def clip_cov(
    x: LossInputs,
    share: Share,
    *,
    clip_range: NonNegative | None = 0.2,
    clip_range_low: NonNegative | None = None,
    clip_range_high: NonNegative | None = None,
    clip_cov_ratio: PositiveFraction = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> tuple[torch.Tensor, Report]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)); 0 for clip_cov_ratio of the batch's tokens (at least one), drawn among
    tokens whose (A - mean A) (lp - mean lp) is between lb and ub.
    """
    assert x.keep_mask is not None
    exponent = log_ratio(x)
    loss, by_clip = clipped(x.advantages, exponent.exp(), *bounds(clip_range, clip_range_low, clip_range_high))
    left_out = x.keep_mask == 0
    report = {
        CLIPPED: by_clip | left_out,
        "pg_clipfrac": masked_sum(by_clip, x.mask),
        "cov_clipfrac": masked_sum(left_out, x.mask),
        "ppo_kl": masked_sum(-exponent.detach(), x.mask),
    }
    return share(loss * x.keep_mask, x.mask), report


@policy_loss("kl_cov", source="arXiv:2505.22617", traits=["ratio"], keep=chosen_to_hold)
def kl_cov(
    x: LossInputs, share: Share, *, kl_cov_ratio: PositiveFraction = 0.0002, ppo_kl_coef: NonNegative = 1.0
) -> tuple[torch.Tensor, Report]:
    """-A r; + ppo_kl_coef |lp - lo| for the kl_cov_ratio of the batch's tokens (at least one) with the largest
    (A - mean A) (lp - mean lp).
    """
    assert x.keep_mask is not None
    exponent = log_ratio(x)
    loss = -x.advantages * exponent.exp() + ppo_kl_coef * exponent.abs() * (1 - x.keep_mask)
    report = {
        "cov_klfrac": masked_sum(x.keep_mask == 0, x.mask),
        "ppo_kl": masked_sum(-exponent.detach(), x.mask),
    }
    return share(loss, x.mask), report
