"""The interface between the reader of a checkpoint format and the writer."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trinity.convert.find import CheckpointError


@dataclass(frozen=True)
class Parameter:
    """A whole tensor by its Hugging Face name.

    `pieces` are views of the files where possible. Flattened, one after the other, they are the elements in row-major
    order; they are cast to `dtype` when they are written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[torch.Tensor, ...]
    keeps_dtype: bool = False  # was not trained: a buffer, such as a router's correction in float32

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Source:
    """A checkpoint that was opened and looks whole.

    `parameters` gives each tensor once. A tensor of two modules comes under its first name; `shared` maps the other
    names to it. `trained_in` is the dtype of the parameters in training, None if the format has none.
    """

    kind: str
    parameters: Iterator[Parameter]
    trained_in: torch.dtype | None
    shared: Mapping[str, str] = field(default_factory=dict)


def want(state: Mapping[str, Any], key: str, kind: type, path: object) -> Any:
    """An entry of a loaded file. Raises CheckpointError that names the file if it is not there or of another type."""
    value = state.get(key)
    if not isinstance(value, kind):
        raise CheckpointError(f"{path} has no usable {key!r}; it is not a checkpoint that can be converted")
    return value


def same_storage(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Maps each name whose tensor shares memory with that of an earlier name to the earlier name."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    shared = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            known = first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
            if known != name:
                shared[name] = known
    return shared
