"""Reads what the ranks of a trainer saved, as slices of named parameters: for ranks of any number and ZeRO stage.

<folder>/slices.json                       written by rank 0: shapes by name, and JSON state
<folder>/rank_00002.json                   numbers of the optimizer by parameter, as the count of its steps
<folder>/rank_00002_00000.safetensors      tensors `<kind>/<start>/<parameter>`, one-dimensional

A tensor has the elements from `start` on of a flattened parameter. Its kind is `master` (float32 weights), the name of
an optimizer's state (`exp_avg`, `exp_avg_sq`), or `buffer`. The slices of a kind cover each parameter that has it.
In place of a parameter, states of 8 bits have `rank <number> master <number>`.
Nothing of these files can run code. The trainer writes them (trinity.trainer.engine.slices).
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoints import data_begin, safetensors_header

FOLDER = "slices"  # below actor/ and critic/
INDEX = "slices.json"
MASTER, BUFFER = "master", "buffer"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class SliceIndex:
    """parameters: shapes of the trained parameters; buffers: of the buffers. tied: maps other names to the first one.

    dtype: of the parameters in training. state: JSON of the trainer. ranks: how many wrote the folder.
    """

    ranks: int
    dtype: str
    parameters: dict[str, list[int]]
    buffers: dict[str, list[int]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Slice:
    start: int
    length: int
    path: Path
    place: int  # first byte in the file
    dtype: torch.dtype


class SliceReader:
    """Opens the files of all ranks; `read` returns views of them."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidInput naming a file that is missing, damaged or of another format."""
        self.folder = folder
        self.index = _index(folder / INDEX)
        self._slices: dict[tuple[str, str], list[_Slice]] = {}
        self._numbers: dict[str, dict[str, float]] = {}
        self._maps: dict[Path, np.ndarray] = {}
        for rank in range(self.index.ranks):
            for name, numbers in _numbers(folder / f"rank_{rank:05d}.json").items():
                self._numbers.setdefault(name, {}).update(numbers)
        for path in sorted(folder.glob("rank_*.safetensors")):
            for key, slice_ in _slices(path):
                self._slices.setdefault(key, []).append(slice_)
        for slices in self._slices.values():
            slices.sort(key=lambda one: one.start)

    def kinds(self, name: str | None = None) -> set[str]:
        """Returns the kinds of a parameter's tensors; None: of all parameters."""
        return {kind for kind, of in self._slices if name in (of, None)}

    def numbers(self, name: str) -> dict[str, float]:
        """Returns the numbers of the optimizer's state of a parameter; empty before its first update."""
        return self._numbers.get(name, {})

    def read(self, kind: str, name: str, start: int, length: int) -> list[torch.Tensor]:
        """Returns the elements from `start` on, in order, as views of the files of the ranks that saved them.

        Raises InvalidInput naming the elements that no file has.
        """
        slices, at, end = self._slices.get((kind, name), []), start, start + length
        found = []
        index = max(0, bisect_right(slices, start, key=lambda one: one.start) - 1)
        for one in slices[index:]:
            first, last = max(at, one.start), min(end, one.start + one.length)
            if first > at or at >= end:
                break
            if last > first:
                found.append(self._view(one, first - one.start, last - first))
                at = last
        if at < end:
            problem = f"has no elements {at} to {end} of the {kind} of {name}; a rank's files are missing"
            raise InvalidInput(str(self.folder), problem)
        return found

    def whole(self, kind: str, name: str, shape: list[int]) -> list[torch.Tensor]:
        """Returns all elements of a parameter or buffer of this shape, as `read`."""
        return self.read(kind, name, 0, math.prod(shape))

    def _view(self, one: _Slice, first: int, length: int) -> torch.Tensor:
        if one.path not in self._maps:  # copy on write: torch warns of memory that cannot be written
            self._maps[one.path] = np.memmap(one.path, np.uint8, "c")
        size = one.dtype.itemsize
        begin = one.place + first * size
        return torch.from_numpy(self._maps[one.path][begin : begin + length * size]).view(one.dtype)


def _index(path: Path) -> SliceIndex:
    value = files.read_json(path)
    try:
        if not isinstance(value, dict):
            raise ValueError("it is no object")
        index = SliceIndex(**value)
        shapes = [*index.parameters.values(), *index.buffers.values()]
        numbers = [index.ranks, *(size for shape in shapes for size in shape)]
        if any(type(number) is not int or number < 0 for number in numbers) or not isinstance(index.state, dict):
            raise ValueError("a shape or the number of ranks is none")
        names = (*index.parameters, *index.buffers, *index.tied, *index.tied.values(), index.dtype)
        if any(not isinstance(name, str) for name in names):
            raise ValueError("a name is none")
    except (TypeError, ValueError, AttributeError) as error:
        there = "is missing" if not path.exists() else f"is no index of slices: {error}"
        raise InvalidInput(str(path), there) from None
    return index


def _numbers(path: Path) -> dict[str, dict[str, float]]:
    value = files.read_json(path)
    if not isinstance(value, dict) or not all(
        isinstance(of, dict) and all(isinstance(number, int | float) for number in of.values()) for of in value.values()
    ):
        raise InvalidInput(str(path), "is damaged" if path.exists() else "is missing")
    return value


def _slices(path: Path) -> Iterator[tuple[tuple[str, str], _Slice]]:
    """Yields kind and name of each tensor of a file, and its place."""
    header, data = safetensors_header(path), data_begin(path)
    for key, entry in header.items():
        kind, start, name = [*key.split("/", 2), "", ""][:3]
        begin, end = entry["data_offsets"]
        dtype = DTYPES.get(entry["dtype"])
        length = entry["shape"][0] if len(entry["shape"]) == 1 else -1
        is_place = start.isascii() and start.isdigit() and len(start) < 19
        size = 0 if dtype is None else dtype.itemsize
        if dtype is None or not is_place or end - begin != length * size or (data + begin) % size:
            raise InvalidInput(str(path), f"holds {json.dumps(key)[:200]}, which is no slice of a parameter")
        yield (kind, name), _Slice(int(start), length, path, data + begin, dtype)
