"""Whole tensors of a Megatron `dist_ckpt` folder of the format torch_dist.

`.metadata` is a pickle of torch.distributed.checkpoint: for each tensor its size, and for each chunk (tensor, offsets)
the file, first byte and length of what torch.save wrote. Layers that are alike are one tensor whose first dimension
is the layer. Tensor- and pipeline-parallel parts are chunks at different offsets.
"""

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trinity.convert.find import CheckpointError
from trinity.convert.megatron.layout import Tensors
from trinity.convert.safe_load import StandIn, load_any, load_description
from trinity.runtime import files

_LAYERS = "decoder.layers."
_MODEL = ("embedding.", "decoder.", "output_layer.")  # all else is of the optimizer and of random states
_Chunk = tuple[tuple[int, ...], Path, tuple[int, int]]
"""Offsets in the whole tensor; file; first byte and length in it."""


def open_dist(folder: Path) -> Tensors:
    """Raises CheckpointError if the format is another, or a file that is needed is missing or too short."""
    said = files.read_json(folder / "metadata.json") if (folder / "metadata.json").is_file() else None
    backend = said.get("sharded_backend") if isinstance(said, dict) else None
    if backend not in (None, "torch_dist"):
        raise CheckpointError(f"{folder} is in the format {backend}; only torch_dist can be converted")
    path = folder / ".metadata"
    state = load_description(path).state
    infos, items = state.get("state_dict_metadata"), state.get("storage_data")
    if not isinstance(infos, dict) or not isinstance(items, dict):
        raise CheckpointError(f"{path} does not say which tensors there are")
    sizes = {name: size for name, info in infos.items() if _is_weight(name) and (size := _size(info)) is not None}
    if not sizes:
        raise CheckpointError(f"{folder} holds no weights of a model (it was saved without them)")
    chunks: dict[str, list[_Chunk]] = defaultdict(list)
    for index, info in items.items():
        if isinstance(index, StandIn) and index.state.get("fqn") in sizes:
            chunks[index.state["fqn"]].append(_chunk(folder, index.state, info))
    _check_files(chunks)
    tensors: dict[str, Any] = {}
    for name, size in sizes.items():
        within = name.removeprefix(_LAYERS)
        if within == name or within.partition(".")[0].isdigit():
            tensors[name] = partial(_assemble, folder, name, chunks[name], size, None)
        else:
            for layer in range(size[0]):
                tensors[f"{_LAYERS}{layer}.{within}"] = partial(_assemble, folder, name, chunks[name], size, layer)
    return tensors


def _is_weight(name: object) -> bool:
    return isinstance(name, str) and name.startswith(_MODEL) and "_extra_state" not in name


def _size(info: object) -> tuple[int, ...] | None:
    size = info.state.get("size") if isinstance(info, StandIn) else None
    return tuple(size) if isinstance(size, torch.Size) else None


def _chunk(folder: Path, index: dict[str, Any], info: object) -> _Chunk:
    state = info.state if isinstance(info, StandIn) else {}
    name, first, length = (state.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or not isinstance(first, int) or not isinstance(length, int):
        raise CheckpointError(f"{folder / '.metadata'} does not say where {index['fqn']} is")
    if Path(name).name != name:
        raise CheckpointError(f"{folder / '.metadata'} points to the file {name!r}, outside its folder; it was refused")
    if state.get("transform_descriptors"):
        raise CheckpointError(f"{folder} was saved with {state['transform_descriptors']}, which cannot be read")
    return tuple(index.get("offset") or ()), folder / name, (first, length)


def _check_files(chunks: dict[str, list[_Chunk]]) -> None:
    """Before anything is written, so that a lost file of a large model is known at once."""
    ends: dict[Path, int] = defaultdict(int)
    for each in chunks.values():
        for _, path, (first, length) in each:
            ends[path] = max(ends[path], first + length)
    for path, end in sorted(ends.items()):
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size < end:
            raise CheckpointError(f"{path} was cut: it has {path.stat().st_size} of at least {end} bytes")


def _assemble(folder: Path, name: str, chunks: list[_Chunk], size: tuple[int, ...], layer: int | None) -> torch.Tensor:
    """The tensor, or one layer of it, from its chunks."""
    whole, found = None, 0
    for offsets, path, span in chunks:
        if layer is not None and offsets and offsets[0] > layer:
            continue
        part = load_any(path, span)
        if not isinstance(part, torch.Tensor) or part.dim() != len(size):
            raise CheckpointError(f"{path} holds no part of {name} of {len(size)} dimensions")
        if layer is not None:
            if layer >= offsets[0] + part.shape[0]:
                continue
            part, offsets = part.narrow(0, layer - offsets[0], 1), (0, *offsets[1:])
        if whole is None:
            whole = torch.empty(size if layer is None else (1, *size[1:]), dtype=part.dtype)
        if any(start + rows > there for start, rows, there in zip(offsets, part.shape, whole.shape, strict=True)):
            raise CheckpointError(f"{path}: a part of {name} lies outside its size {list(size)}")
        whole[tuple(slice(start, start + rows) for start, rows in zip(offsets, part.shape, strict=True))] = part
        found += part.numel()
    if whole is None or found != whole.numel():
        lacking = "no part" if whole is None else f"{found} of {whole.numel()} elements"
        raise CheckpointError(f"{folder} holds {lacking} of {name}" + (f", layer {layer}" if layer is not None else ""))
    return whole if layer is None else whole[0]
