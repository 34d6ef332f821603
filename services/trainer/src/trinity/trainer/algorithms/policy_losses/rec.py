"""REC: group-relative REINFORCE with a choice of clips, weights and regularizers."""

from typing import Literal

import torch

from trinity.plugins import Fraction, NonNegative, Positive, algorithm, policy_loss
from trinity.trainer.algorithms.aggregation import CLIPPED, Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LIMIT, LossInputs, log_ratio, sequence_mean

Weight = Literal[
    "none", "importance_sampling", "truncated_importance_sampling", "gspo_importance_sampling", "advantage"
]


@policy_loss("rec", source="arXiv:2509.24203")
def rec(
    x: LossInputs,
    share: Share,
    *,
    epsilon_low: Fraction = 0.2,
    epsilon_high: NonNegative = 0.2,
    epsilon_low_prime: Fraction = 0.6,
    epsilon_high_prime: NonNegative = 2.0,
    clip_mode: Literal["none", "one-side", "gspo-one-side", "two-side", "ring"] = "none",
    weight: Weight = "none",
    regularizer: Literal["none", "k2", "forward-kl"] = "none",
    regularizer_coef: NonNegative = 0.0,
    temp: Positive = 1.0,
    fix_opd_advantage: bool = False,
) -> tuple[torch.Tensor, Report]:
    """-A w lp where the clip mode allows, else 0; plus the regularizer everywhere.

    r has no gradient.
    clip_mode: `two-side` 1 - low <= r <= 1 + high; `one-side` r <= 1 + high for A >= 0, r >= 1 - low for A <= 0;
    `gspo-one-side` the same with s = exp(mean of lp - lo over the sequence), and the loss a mean of sequences' means;
    `ring` two-side, or r <= 1 - low' for A >= 0, or r >= 1 + high' for A <= 0.
    weight: w = 1; importance_sampling r; truncated_importance_sampling clip(r, 1 - low', 1 + high');
    gspo_importance_sampling s; advantage exp(A / temp).
    regularizer: k2 coef (lp - lo)^2; forward-kl -coef lp.
    fix_opd_advantage adds lo - sg(lp) to A w, so that distillation's advantage is that of the current policy.
    """
    ratio = log_ratio(x).exp().detach()
    sequence = sequence_mean((x.logprobs - x.old_logprobs).detach(), x.mask).clamp(-LIMIT, LIMIT).exp()[:, None]
    sequence = sequence.expand_as(ratio)
    better, worse = x.advantages >= 0, x.advantages <= 0
    low, high = 1 - epsilon_low, 1 + epsilon_high
    low_prime, high_prime = 1 - epsilon_low_prime, 1 + epsilon_high_prime
    two_side = (ratio >= low) & (ratio <= high)
    inside = {
        "none": torch.ones_like(two_side),
        "two-side": two_side,
        "one-side": (better & (ratio <= high)) | (worse & (ratio >= low)),
        "gspo-one-side": (better & (sequence <= high)) | (worse & (sequence >= low)),
        "ring": two_side | (better & (ratio <= low_prime)) | (worse & (ratio >= high_prime)),
    }[clip_mode]
    weights = {
        "none": torch.ones_like(ratio),
        "importance_sampling": ratio,
        "truncated_importance_sampling": ratio.clamp(low_prime, high_prime),
        "gspo_importance_sampling": sequence,
        "advantage": (x.advantages / temp).exp(),
    }[weight]
    advantages = x.advantages * weights
    if fix_opd_advantage:
        advantages = advantages + x.old_logprobs - x.logprobs.detach()
    loss = -advantages * x.logprobs * inside
    if regularizer == "k2":
        loss = loss + regularizer_coef * (x.logprobs - x.old_logprobs).square()
    elif regularizer == "forward-kl":
        loss = loss - regularizer_coef * x.logprobs
    clipped = ~inside
    report = {
        CLIPPED: clipped,
        "pg_clipfrac": masked_sum(clipped, x.mask),
        "ratio": masked_sum(ratio, x.mask),
    }
    if clip_mode == "gspo-one-side":
        share = share.by("seq-mean-token-mean")
    return share(loss, x.mask), report


algorithm("rec", policy_loss="rec", advantage="rec", kl_loss="k2", entropy_loss="default")
