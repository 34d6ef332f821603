"""Records the values that the last update of a step computed for each response token, for `trinity view` and the pages.

A record belongs to one step. It stays on the device until `values`, and does not affect training.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.process.ranks import Ranks

_HAS_CLIP, _HAS_PROXIMAL = 2, 4  # flags; 1: recorded


@dataclass(frozen=True)
class TokenValues:
    """Values of all R response tokens of a sequence, trained or not, float32 [R].

    logprobs: natural, under the weights before the step's last update of the sequence. entropy: in nats, of their
    distributions. clipped bool [R]: True where the policy loss's clip decided; None if the loss has no clip.
    proximal_logprobs: under the weights before the step; None if they equal `logprobs`.
    """

    logprobs: np.ndarray
    entropy: np.ndarray
    clipped: np.ndarray | None
    proximal_logprobs: np.ndarray | None


class TokenRecord:
    """Call `add` for each micro-batch, then `values` once. A sequence that is added again keeps its last values."""

    def __init__(self, ranks: Ranks, copies: int, device: torch.device) -> None:
        """copies: number of ranks with the same micro-batches."""
        self._ranks = ranks
        self._copies = copies
        self._device = device
        self._found: dict[int, tuple[torch.Tensor, int]] = {}

    def add(self, sequences: Sequence[TrainSequence], x: LossInputs, clipped: torch.Tensor | None) -> None:
        """Adds a micro-batch, as compute_loss's `record`. Skips sequences without an experience."""
        flags = 1 + _HAS_CLIP * (clipped is not None) + _HAS_PROXIMAL * (x.proximal_logprobs is not None)
        logprobs = x.logprobs.detach().float()
        parts = [logprobs, x.entropy.detach().float(), x.proximal.float()]
        parts += [torch.zeros_like(logprobs) if clipped is None else clipped.float(), torch.full_like(logprobs, flags)]
        values = torch.stack(parts)
        for row, sequence in enumerate(sequences):
            if sequence.experience is not None:
                self._found[id(sequence.experience)] = values, row

    def values(self, sequences: Sequence[TrainSequence]) -> list[TokenValues | None]:
        """Returns the values of every sequence of the step on rank 0, None for a sequence without an update.

        Returns an empty list on other ranks. A collective.
        """
        if not sequences:
            return []
        ends = np.cumsum([sequence.response_length for sequence in sequences])
        flat = torch.zeros(5, int(ends[-1]), device=self._device)
        for end, sequence in zip(ends.tolist(), sequences, strict=True):
            values, row = self._found.get(id(sequence.experience), (None, 0))
            if values is not None:
                flat[:, end - sequence.response_length : end] = values[:, row, : sequence.response_length]
        if self._ranks.world_size > 1:
            dist.reduce(flat, dst=0)
            flat /= self._copies
        if not self._ranks.is_first:
            return []
        return [_values(part) for part in np.split(flat.cpu().numpy(), ends[:-1], axis=1)]


def _values(part: np.ndarray) -> TokenValues | None:
    """Unpacks the rows that `add` stacks, [5, R]. Returns None for a response without tokens."""
    logprobs, entropy, proximal, clipped, flags = part
    kind = int(flags[0]) if len(flags) else 0
    if not kind:
        return None
    return TokenValues(
        logprobs,
        entropy,
        clipped.astype(bool) if kind & _HAS_CLIP else None,
        proximal if kind & _HAS_PROXIMAL else None,
    )
