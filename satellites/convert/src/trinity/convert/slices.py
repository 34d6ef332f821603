"""Whole parameters from the slices that the ranks of Trinity's trainer wrote: float32 masters, and buffers."""

from collections.abc import Iterator
from pathlib import Path

import torch

from trinity.convert.find import CheckpointError
from trinity.convert.source import Parameter, Source
from trinity.weights.checkpoint_slices import BUFFER, FOLDER, MASTER, SliceReader

__all__ = ["FOLDER", "open_slices"]

# PolicyModel of the trainer holds the Hugging Face model as its attribute `model`.
_PREFIX = "model."


def open_slices(folder: Path) -> Source:
    """Raises InvalidInput naming a file that is missing or damaged."""
    reader = SliceReader(folder)
    index = reader.index
    dtype = getattr(torch, index.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{folder}: was trained in {index.dtype!r}, which is no dtype")
    tied = {name.removeprefix(_PREFIX): first.removeprefix(_PREFIX) for name, first in index.tied.items()}
    return Source(f"slices of {index.ranks} rank(s)", _parameters(reader), dtype, tied)


def _parameters(reader: SliceReader) -> Iterator[Parameter]:
    for kind, shapes in ((MASTER, reader.index.parameters), (BUFFER, reader.index.buffers)):
        for name, shape in shapes.items():
            pieces = reader.whole(kind, name, shape)
            dtype = pieces[0].dtype if pieces else torch.float32
            yield Parameter(name.removeprefix(_PREFIX), tuple(shape), dtype, tuple(pieces), kind == BUFFER)
