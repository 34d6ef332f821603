"""Prompts that several sequences of a packed micro-batch share: computed once, with the responses behind them.

A response's tokens attend to the prompt and to themselves, so the prompt's states are those of each sequence alone, and
their gradient is the sum over the responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from trinity.trainer.data.batch import TrainSequence


@dataclass(frozen=True)
class SharedPrompts:
    """Which tokens of a packed row attend to a shared prompt beside their own segment.

    prompts: of each segment of the row the index of the segment with its prompt; None: it begins with its own.
    read and readers: where the shared prompts lie in the row, end to end, and the responses to them, in the prompts'
    order. read_ends and reader_ends int32 [prompts + 1]: where each prompt and its responses begin in these, and the
    end of the last. longest, most_readers: tokens of the longest prompt, and most tokens of responses to one.
    """

    prompts: tuple[int | None, ...]
    read: slice
    readers: slice
    read_ends: torch.Tensor
    reader_ends: torch.Tensor
    longest: int
    most_readers: int

    def to(self, device: torch.device) -> "SharedPrompts":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: Any = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class Row:
    """Where sequences lie in a packed row.

    lengths: of its segments, end to end: sequences, or shared prompts and their responses. prompt_starts and
    response_starts: of each sequence. shared: None if no prompt is.
    """

    lengths: tuple[int, ...]
    prompt_starts: list[int]
    response_starts: list[int]
    shared: SharedPrompts | None


def with_equal_prompts(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Indices of sequences with equal prompts, in the order of their first."""
    found: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(sequences):
        found.setdefault(sequence.token_ids[: sequence.prompt_length].tobytes(), []).append(index)
    return list(found.values())


def row_of(sequences: Sequence[TrainSequence], share: bool) -> Row:
    """share: prompts that are equal are laid out once. Sequences with a prompt of their own come first, then the shared
    prompts, then the responses to these."""
    groups = with_equal_prompts(sequences) if share else [[index] for index in range(len(sequences))]
    shared = [members for members in groups if len(members) > 1]
    lengths: list[int] = []
    prompts: list[int | None] = []
    starts, responses, end = [0] * len(sequences), [0] * len(sequences), 0
    for (index,) in (members for members in groups if len(members) == 1):
        starts[index], responses[index] = end, end + sequences[index].prompt_length
        lengths.append(sequences[index].length)
        prompts.append(None)
        end += lengths[-1]
    first, begin = len(lengths), end
    for members in shared:
        for index in members:
            starts[index] = end
        lengths.append(sequences[members[0]].prompt_length)
        prompts.append(None)
        end += lengths[-1]
    middle, read = end, lengths[first:]
    for number, members in enumerate(shared):
        for index in members:
            responses[index] = end
            if sequences[index].response_length:
                lengths.append(sequences[index].response_length)
                prompts.append(first + number)
                end += lengths[-1]
    if end == middle:
        return Row(tuple(lengths), starts, responses, None)
    readers = [sum(sequences[index].response_length for index in members) for members in shared]
    return Row(tuple(lengths), starts, responses, SharedPrompts(
        tuple(prompts), slice(begin, middle), slice(middle, end), _ends(read), _ends(readers), max(read), max(readers)
    ))  # fmt: skip


def _ends(lengths: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))


def token_count(sequences: Sequence[TrainSequence]) -> int:
    """Tokens of sequences with one prompt, which counts once."""
    return sequences[0].prompt_length + sum(sequence.response_length for sequence in sequences)
