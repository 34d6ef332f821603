"""Inputs of a loss from a micro-batch, and their ratios. B sequences, R response positions."""

from dataclasses import dataclass, fields, replace

import torch

LIMIT = 20.0  # absolute value of a ratio's exponent


@dataclass(frozen=True)
class LossInputs:
    """Tensors of one micro-batch, aligned with the response, float [B, R] unless stated otherwise.

    logprobs and entropy are the policy's and have its gradient; old_logprobs are those of the sampling engine;
    reference_logprobs those of the frozen base model; proximal_logprobs those of the trainer's weights before the step
    (None: the batch makes one update, and they equal `logprobs`). mask: 1 at the tokens to train. on_policy_mask: 1 at
    tokens that were sampled, as all earlier tokens of the response, by the weights before the step. keep_mask and
    peers_B: results of the loss's `keep` and `peers`. expert_B: 1 for rows of a dataset among rolled-out sequences.
    pairs_B: 1 for the chosen sequence of a preference pair, -1 for the rejected, 0 without a pair. top_logprobs and
    teacher_top: log-probabilities of the teacher's likeliest tokens under the policy, with its gradient, and under the
    teacher, [B, R, k]. None: not needed, or 0. step: the optimizer step, from 1.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    mask: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    reference_logprobs: torch.Tensor | None = None
    proximal_logprobs: torch.Tensor | None = None
    on_policy_mask: torch.Tensor | None = None
    keep_mask: torch.Tensor | None = None
    expert_B: torch.Tensor | None = None
    pairs_B: torch.Tensor | None = None
    peers_B: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    teacher_top: torch.Tensor | None = None
    step: int = 1

    @property
    def proximal(self) -> torch.Tensor:
        """Log-probabilities of the trainer's weights before the step, without gradient, [B, R]."""
        return self.logprobs.detach() if self.proximal_logprobs is None else self.proximal_logprobs

    @property
    def expert(self) -> torch.Tensor:
        """1 at the tokens of expert rows, [B, 1]."""
        none = self.mask.new_zeros(len(self.mask)) if self.expert_B is None else self.expert_B.to(self.mask.dtype)
        return none[:, None]

    def only_masked(self) -> "LossInputs":
        """Sets untrained positions to 0: prompts and padding may hold any value, and 0 * inf is not 0."""
        trained = self.mask > 0
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        clean = {
            name: torch.where(trained if value.dim() == 2 else trained[..., None], value, torch.zeros_like(value))
            for name, value in values.items()
            if isinstance(value, torch.Tensor) and value.shape[:2] == self.mask.shape and name != "mask"
        }
        return replace(self, **clean)  # type: ignore[arg-type]


@dataclass(frozen=True)
class WholeBatch:
    """All sequences of a batch before an update, for a loss's `keep` or `peers`; float64 [R] for each sequence.

    masks bool: tokens to train of rolled-out sequences. log_ratios: logprobs minus the log-probabilities in the ratio's
    denominator. reference: None unless the loss has the trait. groups: equal for the rollouts of a task. pairs: k for
    the chosen sequence of a preference pair, -k for the rejected, 0 without a pair. seed: for random choices.
    """

    masks: list[torch.Tensor]
    logprobs: list[torch.Tensor]
    log_ratios: list[torch.Tensor]
    advantages: list[torch.Tensor]
    reference: list[torch.Tensor] | None
    groups: list[int]
    pairs: list[int]
    seed: int


def log_ratio(x: LossInputs, limit: float = LIMIT) -> torch.Tensor:
    """lp - lo, clamped to +-limit, [B, R]. Beyond the limit it has no gradient."""
    return (x.logprobs - x.old_logprobs).clamp(-limit, limit)


def sequence_sum(values_BR: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
    """Sum over each sequence's trained tokens, [B]."""
    return (values_BR * mask_BR).sum(-1)


def sequence_mean(values_BR: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
    """Mean over each sequence's trained tokens, [B]; 0 without trained tokens."""
    return sequence_sum(values_BR, mask_BR) / mask_BR.sum(-1).clamp(min=1)


def bounds(both: float | None, low: float | None, high: float | None) -> tuple[float, float]:
    """Returns a clip's bounds; `both` replaces a bound that is None. `trinity check` refuses a missing bound."""
    low, high = (both if low is None else low), (both if high is None else high)
    assert low is not None
    assert high is not None
    return low, high


def clipped(
    advantages: torch.Tensor, ratio: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns max(-A r, -A clip(r, 1 - low, 1 + high)), and True where the clip decided."""
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, bounded), bounded > plain
