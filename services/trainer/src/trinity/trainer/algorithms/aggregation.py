"""How token losses become one number. Always over the global batch, whatever micro-batch or rank a token is in."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Totals:
    """Of the whole batch, over all ranks: trained tokens, sequences with at least one, longest response in tokens."""

    tokens: int
    sequences: int
    longest: int


def aggregate(values_BR: torch.Tensor, mask_BR: torch.Tensor, mode: str, totals: Totals) -> torch.Tensor:
    """This part's share of the batch's loss; the shares of all parts add up to it.

    token-mean: sum of all / tokens. seq-mean-token-sum: mean over sequences of each one's sum. seq-mean-token-mean:
    mean over sequences of each one's mean. seq-mean-token-sum-norm: sum of all / longest response (Dr. GRPO,
    arXiv:2503.20783, with the longest response for the constant).
    """
    masked = values_BR * mask_BR
    if mode == "token-mean":
        return masked.sum() / max(totals.tokens, 1)
    if mode == "seq-mean-token-sum":
        return masked.sum() / max(totals.sequences, 1)
    if mode == "seq-mean-token-mean":
        means = masked.sum(-1) / mask_BR.sum(-1).clamp(min=1)
        return means.sum() / max(totals.sequences, 1)
    if mode == "seq-mean-token-sum-norm":
        return masked.sum() / max(totals.longest, 1)
    raise ValueError(f"unknown loss_agg_mode {mode!r}")
