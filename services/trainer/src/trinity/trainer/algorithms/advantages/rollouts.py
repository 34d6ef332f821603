"""Inputs and outputs of advantage functions. N sequences in groups; R response tokens, ragged."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Rollouts:
    """The rolled-out sequences of a batch, as float64 tensors on the CPU.

    rewards_N; groups_N int, equal for the rollouts of one task; masks bool [R] each: the tokens the policy chose;
    logprobs [R] each, of the sampling policy. A trajectory is one rollout of a group, in one sequence or, step by
    step, in several: trajectories_N and steps_N int have its number and the step; without them each sequence is a
    trajectory. facts: info and metrics of each experience. penalties [R] each: the KL penalty of each token; values [R]
    each: a critic's. Both are zero if absent. teachers [R] each: a teacher's log-probabilities; None for a sequence
    without them. seed: for random choices.
    """

    rewards_N: torch.Tensor
    groups_N: torch.Tensor
    masks: Sequence[torch.Tensor]
    logprobs: Sequence[torch.Tensor]
    trajectories_N: torch.Tensor | None = None
    steps_N: torch.Tensor | None = None
    facts: Sequence[Mapping[str, Any]] | None = None
    penalties: Sequence[torch.Tensor] | None = None
    values: Sequence[torch.Tensor] | None = None
    teachers: Sequence[torch.Tensor | None] | None = None
    seed: int = 0

    def __len__(self) -> int:
        return len(self.rewards_N)

    @property
    def returns_N(self) -> torch.Tensor:
        """Rewards, less the penalties of the action tokens."""
        if self.penalties is None:
            return self.rewards_N
        taken = [float((p * m).sum()) for p, m in zip(self.penalties, self.masks, strict=True)]
        return self.rewards_N - torch.tensor(taken, dtype=self.rewards_N.dtype)

    def token_rewards(self, index: int) -> torch.Tensor:
        """Rewards of a sequence's action tokens, in order: minus the penalty, and plus the reward at the last token."""
        mask = self.masks[index]
        rewards = torch.zeros(int(mask.sum()), dtype=torch.float64)
        if self.penalties is not None:
            rewards -= self.penalties[index][mask]
        if len(rewards):
            rewards[-1] += self.rewards_N[index]
        return rewards

    def fact(self, index: int, key: str) -> Any:
        """An entry of the experience's info, else of its metrics; None without it."""
        return self.facts[index].get(key) if self.facts is not None else None

    def number(self, index: int, key: str) -> float | None:
        """The entry as a number; NaN if it is none, so that the step is bad and its error names the group."""
        value = self.fact(index, key)
        if value is None:
            return None
        return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan

    def trajectories(self) -> list[list[int]]:
        """Indices of the sequences of each trajectory, by step."""
        found: dict[tuple[int, int], list[int]] = {}
        for index in range(len(self)):
            trajectory = index if self.trajectories_N is None else int(self.trajectories_N[index])
            found.setdefault((int(self.groups_N[index]), trajectory), []).append(index)
        steps = self.steps_N
        return [sorted(t, key=lambda i: int(steps[i])) if steps is not None else t for t in found.values()]


@dataclass(frozen=True)
class Advantages:
    """tokens [R] each, 0 outside action tokens; scores_N: one number for each sequence, for reports.

    copies_N int: number of times a sequence is trained; 0 leaves it out of the batch's loss. returns [R] each: targets
    of a critic.
    """

    scores_N: torch.Tensor
    tokens: tuple[torch.Tensor, ...]
    copies_N: torch.Tensor
    returns: tuple[torch.Tensor, ...] | None = field(default=None)


def spread(rollouts: Rollouts, scores_N: torch.Tensor, copies_N: torch.Tensor | None = None) -> Advantages:
    """Gives each action token of a sequence the same advantage."""
    tokens = tuple(score * mask for score, mask in zip(scores_N, rollouts.masks, strict=True))
    if copies_N is None:
        copies_N = torch.ones(len(rollouts), dtype=torch.long)
    return Advantages(scores_N, tokens, copies_N)


def by_token(
    rollouts: Rollouts, values: Sequence[torch.Tensor], returns: Sequence[torch.Tensor] | None = None
) -> Advantages:
    """Takes advantages (and returns) of the action tokens of each sequence, in order; the score is their mean."""
    scores = torch.stack([v.mean() if len(v) else v.sum() for v in values]) if len(values) else rollouts.rewards_N
    return Advantages(
        scores_N=scores,
        tokens=tuple(placed(v, m) for v, m in zip(values, rollouts.masks, strict=True)),
        copies_N=torch.ones(len(rollouts), dtype=torch.long),
        returns=None if returns is None else tuple(placed(v, m) for v, m in zip(returns, rollouts.masks, strict=True)),
    )


def of_sequences(rollouts: Rollouts, values: Sequence[tuple[int, torch.Tensor]]) -> Advantages:
    """Takes (index, advantages [R]) of sequences, in any order; the score is the mean over action tokens.

    A sequence is trained once for each time its index appears.
    """
    tokens = [torch.zeros(len(mask), dtype=torch.float64) for mask in rollouts.masks]
    copies_N = torch.zeros(len(rollouts), dtype=torch.long)
    for index, given in values:
        tokens[index] = torch.as_tensor(given, dtype=torch.float64) * rollouts.masks[index]
        copies_N[index] += 1
    counts = [max(int(mask.sum()), 1) for mask in rollouts.masks]
    scores_N = torch.tensor([float(t.sum()) / n for t, n in zip(tokens, counts, strict=True)], dtype=torch.float64)
    return Advantages(scores_N, tuple(tokens), copies_N)


def placed(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Places values of the action tokens at their positions among all R; 0 elsewhere."""
    whole = torch.zeros(len(mask), dtype=torch.float64)
    whole[mask] = values
    return whole


def groups(groups_N: torch.Tensor) -> list[torch.Tensor]:
    """Indices of the members of each group, in order of appearance."""
    found: dict[int, list[int]] = {}
    for index, group in enumerate(groups_N.tolist()):
        found.setdefault(group, []).append(index)
    return [torch.tensor(members) for members in found.values()]


def mean_and_std(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and sample standard deviation (n - 1): 0 and 1 for one value, exactly the value and 0 for equal values."""
    if len(values) == 1:
        return values.new_zeros(()), values.new_ones(())
    if bool((values == values[0]).all()):
        return values[0], values.new_zeros(())
    return values.mean(), values.std(unbiased=True)


def mean_of(values: torch.Tensor) -> torch.Tensor:
    """The mean; for equal values exactly their value, so that its subtraction leaves 0."""
    return values[0] if bool((values == values[0]).all()) else values.mean()


def whiten(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """(x - mean) / sqrt(variance + 1e-8) over all values of all sequences, variance with n - 1; 0 for one value."""
    if not sum(len(v) for v in values):
        return list(values)
    flat = torch.cat(list(values))
    variance = flat.var(unbiased=True) if len(flat) > 1 else flat.new_zeros(())
    return [(v - flat.mean()) * torch.rsqrt(variance + 1e-8) for v in values]
