"""Sequence parallelism (Ulysses, arXiv:2309.14509) through DeepSpeed's all-to-all.

Each rank holds a contiguous part of the tokens. In attention it holds all tokens of some heads instead.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trinity.runtime.errors import InvalidInput
from trinity.trainer.process.ranks import Ranks

KEY = "trainer.ulysses_sequence_parallel_size"


@dataclass(frozen=True)
class SequenceGroup:
    """This rank's place among the `size` ranks that share its sequences."""

    rank: int
    size: int
    group: Any

    def heads_for_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """[1, T / size, heads, width] of this rank's tokens -> [1, T, heads / size, width] of its heads.

        Repeats heads if there are fewer heads than ranks. Keeps the gradient.
        """
        heads = states.shape[2]
        if heads < self.size:
            states = states.repeat_interleave(self.size // heads, dim=2)
        return self._exchange(states, scatter=2, gather=1)

    def tokens_for_heads(self, states: torch.Tensor) -> torch.Tensor:
        """[1, T, heads / size, width] of its heads -> [1, T / size, heads, width] of its tokens. Keeps the gradient."""
        return self._exchange(states, scatter=1, gather=2)

    def _exchange(self, states: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
        from deepspeed.sequence.layer import _SeqAllToAll

        exchanged: torch.Tensor = _SeqAllToAll.apply(self.group, states, scatter, gather, 0)
        return exchanged

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over the group, on each of its ranks. Each rank's gradient is that of its part."""
        summed: torch.Tensor = _Sum.apply(values, self.group)
        return summed


class _Sum(torch.autograd.Function):
    """Passes the gradient of the sum to each part, since all ranks compute the same loss of the sum."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def make_groups(ranks: Ranks, size: int) -> SequenceGroup | None:
    """Makes groups of `size` neighbouring ranks; returns this rank's, or None for size 1. A collective.

    Raises InvalidInput if `size` does not divide the number of ranks.
    """
    if size == 1:
        return None
    check_ranks(ranks.world_size, size)
    mine = None
    for first in range(0, ranks.world_size, size):
        group = dist.new_group(list(range(first, first + size)))
        if first <= ranks.rank < first + size:
            mine = SequenceGroup(ranks.rank - first, size, group)
    assert mine is not None
    return mine


def check_ranks(ranks: int, size: int) -> None:
    """Raises InvalidInput if `size` does not divide the number of ranks."""
    if ranks % size:
        raise InvalidInput(KEY, f"is {size}, which does not divide the {ranks} ranks of the trainer")


def check_heads(config: Any, size: int) -> None:
    """Raises InvalidInput if `size` ranks cannot share the heads of a model of this configuration."""
    queries = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or queries
    if queries % size or (keys % size and size % keys):
        raise InvalidInput(KEY, f"is {size}; {size} ranks cannot share the model's {queries} heads ({keys} key heads)")
