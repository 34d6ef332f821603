"""Clip-Cov and KL-Cov: few tokens, whose log-probability and advantage vary together most, take the entropy away.

The entropy mechanism of RL, arXiv:2505.22617. The covariance of a token is (A - mean of A) (lp - mean of lp), the means
over the tokens of the batch, whose weights are those that an update begins with. x.keep_mask is 0 at the chosen tokens.
"""

import numpy as np
import torch

from trinity.trainer.algorithms.aggregation import Share
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.policy_losses.ratios import clipped, log_ratio
from trinity.trainer.algorithms.report import Report, masked_sum

Ragged = list[torch.Tensor]


def clip_cov(
    x: LossInputs,
    share: Share,
    *,
    clip_range: float = 0.2,
    clip_range_low: float | None = None,
    clip_range_high: float | None = None,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> tuple[torch.Tensor, Report]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), 0 for the chosen tokens. `chosen_to_clip` chooses."""
    assert x.keep_mask is not None
    exponent = log_ratio(x)
    loss, by_clip = clipped(x.advantages, exponent.exp(), *_bounds(clip_range, clip_range_low, clip_range_high))
    report = {
        "pg_clipfrac": masked_sum(by_clip, x.mask),
        "cov_clipfrac": masked_sum(x.keep_mask == 0, x.mask),
        "ppo_kl": masked_sum(-exponent.detach(), x.mask),
    }
    return share(loss * x.keep_mask, x.mask), report


def kl_cov(
    x: LossInputs, share: Share, *, kl_cov_ratio: float = 0.0002, ppo_kl_coef: float = 1.0
) -> tuple[torch.Tensor, Report]:
    """-A r, and ppo_kl_coef |lp - lo| more for the chosen tokens. `chosen_to_hold` chooses."""
    assert x.keep_mask is not None
    exponent = log_ratio(x)
    loss = -x.advantages * exponent.exp() + ppo_kl_coef * exponent.abs() * (1 - x.keep_mask)
    report = {
        "cov_klfrac": masked_sum(x.keep_mask == 0, x.mask),
        "ppo_kl": masked_sum(-exponent.detach(), x.mask),
    }
    return share(loss, x.mask), report


def chosen_to_clip(
    policy: Ragged, log_ratios: Ragged, advantages: Ragged, masks: Ragged, args: dict[str, float], seed: int
) -> Ragged:
    """Tokens that are kept, bool [R] for each sequence: all but clip_cov_ratio of the batch's (one at least), drawn
    among those with a covariance between clip_cov_lb and clip_cov_ub that PPO's clip does not touch.
    """
    if not masks:
        return []
    mask, covariance = _covariances(policy, advantages, masks)
    low, high = _bounds(args["clip_range"], args.get("clip_range_low"), args.get("clip_range_high"))
    _, by_clip = clipped(torch.cat(advantages).double(), torch.cat(log_ratios).double().exp(), low, high)
    inside = (covariance > args["clip_cov_lb"]) & (covariance < args["clip_cov_ub"]) & mask & ~by_clip
    candidates = torch.nonzero(inside)[:, 0]
    count = max(int(args["clip_cov_ratio"] * int(mask.sum())), 1)
    drawn = np.random.default_rng(seed).permutation(len(candidates))[:count]
    return _without(mask, candidates[torch.from_numpy(drawn)], masks)


def chosen_to_hold(policy: Ragged, advantages: Ragged, masks: Ragged, kl_cov_ratio: float) -> Ragged:
    """Tokens that are kept: all but kl_cov_ratio of the batch's (one at least), those with the largest covariance."""
    if not masks:
        return []
    mask, covariance = _covariances(policy, advantages, masks)
    count = max(int(kl_cov_ratio * int(mask.sum())), 1) if mask.any() else 0
    order = covariance.masked_fill(~mask, -torch.inf).sort(descending=True, stable=True).indices
    return _without(mask, order[:count], masks)


def _covariances(policy: Ragged, advantages: Ragged, masks: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask and covariances of all tokens of all sequences, [all R]."""
    mask, lp, a = torch.cat(masks).bool(), torch.cat(policy).double(), torch.cat(advantages).double()
    count = max(int(mask.sum()), 1)
    return mask, (a - a[mask].sum() / count) * (lp - lp[mask].sum() / count)


def _without(mask: torch.Tensor, places: torch.Tensor, masks: Ragged) -> Ragged:
    kept = mask.clone()
    kept[places] = False
    return list(kept.split([len(m) for m in masks]))


def _bounds(both: float, low: float | None, high: float | None) -> tuple[float, float]:
    return (both if low is None else low), (both if high is None else high)
