"""Policy losses: a loss for every response token, and what to report about it. B sequences, R response positions."""

from collections.abc import Callable
from typing import Any

import torch

from trinity.trainer.algorithms.report import Report, masked_sum

PolicyLossFn = Callable[..., tuple[torch.Tensor, Report]]


def ppo(
    logprobs_BR: torch.Tensor,
    old_logprobs_BR: torch.Tensor,
    advantages_BR: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    clip_range: float = 0.2,
    clip_range_low: float | None = None,
    clip_range_high: float | None = None,
    clip_ratio_c: float = 3.0,
) -> tuple[torch.Tensor, Report]:
    """Clipped surrogate with dual clip, [B, R].

    max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(new - old) (PPO, arXiv:1707.06347, equation 7); for A < 0 at
    most -A c (dual clip, arXiv:1912.09729, equation 5). The log-ratio is clamped to +-20. `clip_range` stands for both
    bounds unless they are given (clip-higher: DAPO, arXiv:2503.14476, equation 10).
    """
    low = clip_range if clip_range_low is None else clip_range_low
    high = clip_range if clip_range_high is None else clip_range_high
    log_ratio = (logprobs_BR - old_logprobs_BR).clamp(-20, 20)
    ratio = log_ratio.exp()
    plain = -advantages_BR * ratio
    clipped = -advantages_BR * ratio.clamp(1 - low, 1 + high)
    upper = torch.maximum(plain, clipped)
    bound = -advantages_BR * clip_ratio_c
    loss = torch.where(advantages_BR < 0, torch.minimum(upper, bound), upper)
    with torch.no_grad():
        report = {
            "pg_clipfrac": masked_sum(clipped > plain, mask_BR),
            "pg_clipfrac_lower": masked_sum((upper > bound) & (advantages_BR < 0), mask_BR),
            "ppo_kl": masked_sum(-log_ratio, mask_BR),
            "ratio": masked_sum(ratio, mask_BR),
        }
    return loss, report


def sft(
    logprobs_BR: torch.Tensor,
    old_logprobs_BR: torch.Tensor | None,
    advantages_BR: torch.Tensor | None,
    mask_BR: torch.Tensor,
    *,
    use_token_level_loss: bool = True,
) -> tuple[torch.Tensor, Report]:
    """Negative log-likelihood, [B, R]. The argument chooses the aggregation, see `aggregation_of`."""
    return -logprobs_BR, {"sft_loss": masked_sum(-logprobs_BR.detach(), mask_BR)}


POLICY_LOSSES: dict[str, PolicyLossFn] = {"ppo": ppo, "sft": sft}


def aggregation_of(name: str, args: dict[str, Any], chosen: str) -> str:
    """The aggregation a loss asks for: SFT over sequences if it is not token-level, else what the YAML chose."""
    if name == "sft" and not args.get("use_token_level_loss", True):
        return "seq-mean-token-mean"
    return chosen
