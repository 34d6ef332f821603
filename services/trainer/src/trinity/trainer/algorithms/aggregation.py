"""Aggregates token losses and metrics over the global batch, equally for every split into parts and ranks."""

from dataclasses import dataclass, replace

import torch

# name -> tensor [2]: sum of the values, number of the values
Report = dict[str, torch.Tensor]
# Key of a policy loss's report for the tokens at which its clip decided, bool [B, R]; compute_loss removes it.
CLIPPED = "clipped_BR"


@dataclass(frozen=True)
class Totals:
    """Totals of the whole batch, over all ranks: trained tokens, and sequences with at least one of them.

    pairs: preference pairs. rolled_out, expert: totals of these sequences.
    """

    tokens: int
    sequences: int
    pairs: int = 0
    rolled_out: "Totals | None" = None
    expert: "Totals | None" = None


def aggregate(
    values_BR: torch.Tensor, mask_BR: torch.Tensor, mode: str, totals: Totals, max_response_tokens: int = 1
) -> torch.Tensor:
    """Returns this part's share of the batch's loss; the shares of all parts add up to it.

    token-mean: sum of all / tokens. seq-mean-token-sum: mean over sequences of their sums. seq-mean-token-mean: mean
    over sequences of their means. seq-mean-token-sum-norm: mean over sequences of their sums / max_response_tokens, a
    constant of the run (Dr. GRPO, arXiv:2503.20783, section 3.2).
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
        return masked.sum() / (max(totals.sequences, 1) * max_response_tokens)
    raise ValueError(f"unknown loss_agg_mode {mode!r}")


@dataclass(frozen=True)
class Share:
    """`aggregate` bound to the batch's totals, the chosen mode, and the weights of a correction.

    weights: float [B, R] or [B, 1], without gradient; None: 1.
    """

    mode: str
    totals: Totals
    weights: torch.Tensor | None = None
    max_response_tokens: int = 1

    def __call__(self, values_BR: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
        """Returns the share of the loss, from a loss for every token."""
        weighted = values_BR if self.weights is None else values_BR * self.weights
        return aggregate(weighted, mask_BR, self.mode, self.totals, self.max_response_tokens)

    def of_sequences(self, values_B: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
        """Returns the share of the loss, from a loss for every sequence (the sum over tokens); 0 without tokens."""
        lengths = mask_BR.sum(-1, keepdim=True).clamp(min=1)
        return self(values_B[:, None] / lengths * torch.ones_like(mask_BR), mask_BR)

    def by_geometric_mean(self, mask_BR: torch.Tensor) -> "Share":
        """Replaces each sequence's weights by the geometric mean over its trained tokens."""
        if self.weights is None:
            return self
        logs = torch.where(mask_BR > 0, self.weights.log(), torch.zeros_like(mask_BR))
        return replace(self, weights=(logs.sum(-1, keepdim=True) / mask_BR.sum(-1, keepdim=True).clamp(min=1)).exp())

    def by(self, mode: str) -> "Share":
        return replace(self, mode=mode)

    def among(self, totals: Totals | None) -> "Share":
        """Replaces the totals by those of a part of the batch; None keeps the totals."""
        return replace(self, totals=totals or self.totals)


def masked_sum(values_BR: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
    """Returns the sum over the masked positions and their number, [2]."""
    mask = mask_BR.to(torch.float32)
    return torch.stack([(values_BR.to(torch.float32) * mask).sum(), mask.sum()])


def join(reports: list[Report]) -> Report:
    """Adds up reports."""
    total: Report = {}
    for report in reports:
        for name, pair in report.items():
            total[name] = total[name] + pair if name in total else pair.clone()
    return total


def means(report: Report) -> dict[str, float]:
    """Returns the mean of each entry; drops entries without values."""
    return {name: float(pair[0] / pair[1]) for name, pair in report.items() if pair[1] > 0}
