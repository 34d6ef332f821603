"""Layout of packed micro-batches in which several sequences share a prompt, which is computed once.

A response's tokens attend to the prompt and to earlier tokens of the response. So the prompt's states equal those of
each sequence computed separately, and their gradient is the sum over the responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from trinity.trainer.data.batch import TrainSequence


@dataclass(frozen=True)
class SharedPrompts:
    """Segments of a packed row that attend to a shared prompt as well as to themselves.

    prompts: for each segment of the row the index of the segment with its prompt; None if it contains its prompt.
    read, readers: slices of the row with the shared prompts, end to end, and with the responses to them, in the
    prompts' order. read_ends, reader_ends int32 [prompts + 1]: starts of each prompt and of its responses within these
    slices, and the end of the last. longest: tokens of the longest prompt. most_readers: maximum over prompts of the
    tokens of their responses.
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
    """Layout of sequences in a packed row.

    lengths: lengths of the segments, end to end: sequences, or shared prompts and their responses. prompt_starts,
    response_starts: positions of each sequence's prompt and response. shared: None if no prompt is shared.
    """

    lengths: tuple[int, ...]
    prompt_starts: list[int]
    response_starts: list[int]
    shared: SharedPrompts | None


def with_equal_prompts(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Groups indices of sequences by equal prompts, in order of first appearance."""
    found: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(sequences):
        found.setdefault(sequence.token_ids[: sequence.prompt_length].tobytes(), []).append(index)
    return list(found.values())


def row_of(sequences: Sequence[TrainSequence], share: bool) -> Row:
    """Lays out a row. share: equal prompts are laid out once.

    Sequences with distinct prompts come first, then the shared prompts, then the responses to these.
    """
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
    """Counts the tokens of sequences with equal prompts; the prompt counts once."""
    return sequences[0].prompt_length + sum(sequence.response_length for sequence in sequences)
