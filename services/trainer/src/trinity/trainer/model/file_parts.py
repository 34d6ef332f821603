"""The tensors of a model's files that transformers keeps as one parameter, such as a layer's experts.

transformers 5 fuses experts when it loads a checkpoint and divides them when it saves one. Engines and other users of
the weights know the files' tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

from trinity.weights.lora import in_model


@dataclass(frozen=True)
class FilePart:
    """Rows `first` to `first + rows` of a parameter seen as a matrix; `shape` is the tensor's in the file."""

    name: str
    first: int
    rows: int
    shape: tuple[int, ...]

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a view of a contiguous parameter."""
        if parameter.shape == self.shape:
            return parameter
        return parameter.view(-1, self.shape[-1])[self.first : self.first + self.rows].view(self.shape)


class FileParts:
    """The parts of a transformers model's parameters."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._found: dict[str, list[FilePart]] = {}

    def of(self, name: str, shape: tuple[int, ...]) -> list[FilePart]:
        """Returns the parts of a parameter, usually one. Raises ValueError if a part is not a block of rows."""
        if name not in self._found:
            self._found[name] = self._divided(name, shape) or [FilePart(name, 0, prod(shape[:-1]), shape)]
        return self._found[name]

    def cut(self, name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of the files as views of a contiguous parameter."""
        for part in self.of(name, tuple(parameter.shape)):
            yield part.name, part.of(parameter)

    def _divided(self, name: str, shape: tuple[int, ...]) -> list[FilePart]:
        if len(shape) < 2 or ".lora_" in name:
            return []
        try:
            from transformers.core_model_loading import revert_weight_conversion
        except ImportError:  # before 5.0: parameters are those of the files
            return []
        rows = torch.arange(prod(shape[:-1])).view(*shape[:-1], 1).repeat_interleave(2, -1)  # one would be squeezed
        found = revert_weight_conversion(self._model, {name: rows})
        if len(found) == 1 and in_model(next(iter(found))) in (name, in_model(name)):  # engines know both prefixes
            return []
        return [_part(file, index[..., 0], shape[-1]) for file, index in found.items()]


def _part(name: str, indices: torch.Tensor, width: int) -> FilePart:
    rows = indices.flatten().tolist()
    if any(after != before + 1 for before, after in pairwise(rows)):
        raise ValueError(f"{name} is not a block of rows of one parameter")
    return FilePart(name, rows[0], len(rows), (*indices.shape, width))
