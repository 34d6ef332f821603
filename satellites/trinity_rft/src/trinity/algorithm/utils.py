"""Trinity-RFT's means for losses and advantages, of torch's tensors."""

from typing import Any


def masked_sum(values: Any, mask: Any, axis: int | None = None) -> Any:
    """Sum where the mask is set; over all, or along an axis."""
    kept = values * mask
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Any, mask: Any, axis: int | None = None) -> Any:
    """Mean where the mask is set; 0 where it is nowhere."""
    count = mask.sum() if axis is None else mask.sum(dim=axis)
    return masked_sum(values, mask, axis) / count.clamp(min=1)


def aggregate_loss(values: Any, mask: Any, loss_agg_mode: str = "token-mean") -> Any:
    """Token losses [B, R] to one number: token-mean, seq-mean-token-sum or seq-mean-token-mean.

    A mean over sequences is one over those with a token.
    """
    if loss_agg_mode == "token-mean":
        return masked_mean(values, mask)
    sequences = (mask.sum(dim=-1) > 0).sum().clamp(min=1)
    if loss_agg_mode == "seq-mean-token-sum":
        return masked_sum(values, mask, -1).sum() / sequences
    if loss_agg_mode == "seq-mean-token-mean":
        return masked_mean(values, mask, -1).sum() / sequences
    raise ValueError(f"unknown loss_agg_mode {loss_agg_mode!r}")
