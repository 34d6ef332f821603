"""Ratios between the policy and the one that sampled, of tokens and of sequences."""

import torch

from trinity.trainer.algorithms.inputs import LossInputs

LIMIT = 20.0


def log_ratio(x: LossInputs, limit: float = LIMIT) -> torch.Tensor:
    """lp - lo, clamped to +-limit, [B, R]. Beyond it there is no gradient."""
    return (x.logprobs - x.old_logprobs).clamp(-limit, limit)


def sequence_sum(values_BR: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
    """Sum over each sequence's trained tokens, [B]."""
    return (values_BR * mask_BR).sum(-1)


def sequence_mean(values_BR: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
    """Mean over each sequence's trained tokens, [B]; without any 0."""
    return sequence_sum(values_BR, mask_BR) / mask_BR.sum(-1).clamp(min=1)


def clipped(
    advantages: torch.Tensor, ratio: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and where the clip decided."""
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, bounded), bounded > plain
