"""Sharing a batch out: over ranks by tokens, and on each rank into micro-batches that fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trinity.trainer.batch import TrainSequence


@dataclass(frozen=True)
class MicroBatch:
    """B sequences, padded on the right to L tokens.

    input_ids int64 [B, L]; attention_mask int64 [B, L]; temperatures float32 [B]. The others float32 [B, L - 1] and
    aligned with the prediction of the next token: position t speaks of token t + 1; mask is 0 outside trained tokens.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    temperatures: torch.Tensor
    mask: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(**{name: value.to(device) for name, value in vars(self).items()})


def plan_micro_batches(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """[rank][micro-batch] -> indices of sequences. Every rank gets as many micro-batches, some perhaps empty.

    Sequences go, longest first, to the rank with the fewest tokens; each rank then fills micro-batches of at most
    `budget` padded tokens in order of length, so that little is padded.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in order:
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    plans = [_fill(share, lengths, budget) for share in shares]
    most = max(1, *(len(plan) for plan in plans))
    return [plan + [[]] * (most - len(plan)) for plan in plans]


def _fill(share: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for index in share:  # longest first: the first of a micro-batch sets its width
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def collate(sequences: Sequence[TrainSequence], padding: int) -> MicroBatch:
    """Tensors of some sequences. Of none: one row of two tokens that trains nothing, so that all ranks do the same."""
    if not sequences:
        nothing = np.zeros(1, np.float32)
        filler = np.full(2, padding, np.int32)
        sequences = [TrainSequence(filler, 1, nothing, nothing.astype(bool), group=0)]
    rows, width = len(sequences), max(sequence.length for sequence in sequences)
    ids = np.full((rows, width), padding, np.int64)
    attention = np.zeros((rows, width), np.int64)
    mask, old, advantage = (np.zeros((rows, width - 1), np.float32) for _ in range(3))
    for row, sequence in enumerate(sequences):
        length, begin = sequence.length, sequence.prompt_length - 1
        ids[row, :length] = sequence.token_ids
        attention[row, :length] = 1
        mask[row, begin : length - 1] = sequence.mask
        old[row, begin : length - 1] = sequence.old_logprobs
        advantage[row, begin : length - 1] = sequence.advantage
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy(attention),
        temperatures=torch.tensor([sequence.temperature for sequence in sequences], dtype=torch.float32),
        mask=torch.from_numpy(mask),
        old_logprobs=torch.from_numpy(old),
        advantages=torch.from_numpy(advantage),
    )
