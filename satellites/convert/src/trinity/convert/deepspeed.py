"""Whole parameters from a DeepSpeed checkpoint of ZeRO stage 0, 1, 2 or 3.

The layout is that of deepspeed/utils/zero_to_fp32.py (DeepSpeed 0.19). `param_shapes` of the model states lists
the parameters of each group in the order of its flat float32 vector. Stages 1 and 2 cut the whole vector into one part
per rank. Stage 3 cuts every parameter into one part per rank, the last one padded, and each rank's vectors are its
parts one after the other.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trinity.convert.find import CheckpointError
from trinity.convert.safe_load import StandIn, load_safely
from trinity.convert.source import Parameter, Source, same_storage, want

# PolicyModel of the trainer holds the Hugging Face model as its attribute `model`.
_PREFIX = "model."
_FIRST = "mp_rank_00_model_states.pt"


def open_deepspeed(folder: Path) -> Source:
    """Raises CheckpointError if a rank's file is missing or the checkpoint is split in a way that is not supported."""
    if other := next(folder.glob("*mp_rank_01_*.pt"), None):
        raise CheckpointError(f"{other} is of a tensor-parallel run; these cannot be converted")
    whole, sharded = folder / _FIRST, folder / f"zero_pp_rank_0_{_FIRST}"
    path = sharded if sharded.exists() and not whole.exists() else whole
    state = load_safely(path)
    module = want(state, "module", dict, path)
    dtypes = [value.dtype for value in module.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    if not dtypes:
        raise CheckpointError(f"{path} has no parameters in 'module'")
    if state.get("param_shapes") is None:
        shared = same_storage(module)
        kind, parameters = "DeepSpeed, ZeRO-0", _unpartitioned(path, state, module, shared)
    else:
        shared = want(state, "shared_params", dict, path)
        kind, parameters = _open_zero(folder, path, state)
    names = {name.removeprefix(_PREFIX): first.removeprefix(_PREFIX) for name, first in shared.items()}
    return Source(kind, parameters, dtypes[0], names)


def _unpartitioned(
    path: Path, state: dict[str, Any], module: dict[str, torch.Tensor], shared: dict[str, str]
) -> Iterator[Parameter]:
    """Stage 0: `module` is whole. In 16 bits the optimizer keeps float32 copies of the parameters, in their order."""
    buffers = set(state.get("buffer_names") or ())
    names = [name for name in module if name not in shared and name not in buffers]
    optimizer = state.get("optimizer")
    groups = optimizer.get("fp32_groups") if isinstance(optimizer, dict) else None
    masters: dict[str, torch.Tensor] = {}
    if isinstance(groups, list) and len(groups) == 1 and len(groups[0]) == len(names):
        masters = dict(zip(names, groups[0], strict=True))
    if any(masters[name].shape != module[name].shape for name in masters):
        masters = {}
    for name, tensor in module.items():
        if name not in shared:
            yield _whole(name, [masters.get(name, tensor).reshape(-1)], tensor.shape, path)


@dataclass(frozen=True)
class _Rank:
    """One rank's share of the float32 parameters: a flat vector for each group."""

    path: Path
    groups: list[torch.Tensor]
    paddings: list[list[int]] | None


def _cut(vectors: Sequence[torch.Tensor], start: int, count: int) -> list[torch.Tensor]:
    """Elements [start, start + count) of vectors that follow one another, as views."""
    pieces = []
    for vector in vectors:
        size = vector.numel()
        if count > 0 and start < size:
            taken = min(count, size - start)
            pieces.append(vector.narrow(0, start, taken))
            count -= taken
            start = size
        start -= size
    return pieces


def _open_zero(folder: Path, path: Path, state: dict[str, Any]) -> tuple[str, Iterator[Parameter]]:
    shapes = want(state, "param_shapes", list, path)
    world = want(state, "dp_world_size", int, path)
    paths = [_optimizer_file(folder, rank) for rank in range(world)]
    stage, first = _load_rank(paths[0], len(shapes))
    ranks = [first, *(_load_rank(other, len(shapes))[1] for other in paths[1:])]
    frozen = _frozen(folder, state, world, stage)
    buffers = [(name, state["module"][name]) for name in state.get("buffer_names") or ()]
    trained = _stage3(ranks, shapes) if stage == 3 else _stage12(ranks, shapes)

    def parameters() -> Iterator[Parameter]:
        yield from trained
        yield from frozen
        for name, buffer in buffers:
            yield _whole(name, [buffer.reshape(-1)], buffer.shape, path)

    return f"DeepSpeed, ZeRO-{stage}, {world} rank{'s' * (world > 1)}", parameters()


def _optimizer_file(folder: Path, rank: int) -> Path:
    names = [f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for prefix in ("", "bf16_")]
    for name in names:
        if (folder / name).exists():
            return folder / name
    prefix = "bf16_" if any(folder.glob("bf16_zero_*")) else ""
    raise CheckpointError(f"{folder / (prefix + names[0])} is missing")


def _load_rank(path: Path, groups: int) -> tuple[int, _Rank]:
    optimizer = want(load_safely(path), "optimizer_state_dict", dict, path)
    stage = optimizer.get("zero_stage")
    stage = stage.args[0] if isinstance(stage, StandIn) and stage.args else stage
    if stage not in (1, 2, 3):
        raise CheckpointError(f"{path} is of ZeRO stage {stage!r}, which is unknown")
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    vectors = want(optimizer, key, list, path)
    if not all(isinstance(vector, torch.Tensor) and vector.dim() == 1 for vector in vectors):
        raise CheckpointError(f"{path} has no usable {key!r}; its float32 parameters are not in the file")
    if stage != 3 and len(vectors) != groups:
        raise CheckpointError(f"{path} has {len(vectors)} parameter groups where the model states have {groups}")
    return stage, _Rank(path, vectors, optimizer.get("param_alignment_paddings"))


def _stage12(ranks: list[_Rank], groups: list[dict[str, torch.Size]]) -> Iterator[Parameter]:
    for index, shapes in enumerate(groups):
        vectors = [rank.groups[index] for rank in ranks]
        all_paddings = ranks[0].paddings
        paddings = all_paddings[index] if all_paddings else [0] * len(shapes)
        start = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            count = shape.numel()
            yield _whole(name, _cut(vectors, start, count), shape, ranks[0].path)
            start += count + padding
        _check_end(start, sum(vector.numel() for vector in vectors), 2 * len(ranks), ranks[0].path)


def _stage3(ranks: list[_Rank], groups: list[dict[str, torch.Size]]) -> Iterator[Parameter]:
    start = 0
    for shapes in groups:
        for name, shape in shapes.items():
            part = math.ceil(shape.numel() / len(ranks))
            pieces = [piece for rank in ranks for piece in _cut(rank.groups, start, part)]
            yield _whole(name, pieces, shape, ranks[0].path)
            start += part
    for rank in ranks:
        _check_end(start, sum(vector.numel() for vector in rank.groups), 1, rank.path)


def _check_end(used: int, there: int, alignment: int, path: Path) -> None:
    """Checks that only the padding to a multiple of `alignment` is left; else the assumed order is wrong."""
    if math.ceil(used / alignment) != math.ceil(there / alignment):
        raise CheckpointError(f"{path.parent}: {used} of {there} float32 elements have a name; the layout is unknown")


def _frozen(folder: Path, state: dict[str, Any], world: int, stage: int) -> list[Parameter]:
    """Parameters without an optimizer: whole in stages 1 and 2, a part in each rank's model states in stage 3."""
    shapes = state.get("frozen_param_shapes") or {}
    if not shapes:
        return []
    states = [(folder / _FIRST, state)]
    if stage == 3:
        paths = [folder / f"zero_pp_rank_{rank}_{_FIRST}" for rank in range(world)]
        states = [(path, load_safely(path)) for path in paths]
    fragments = [want(each, "frozen_param_fragments", dict, path) for path, each in states]
    return [
        _whole(name, [each[name].reshape(-1) for each in fragments], shape, states[0][0])
        for name, shape in shapes.items()
    ]


def _whole(name: str, pieces: list[torch.Tensor], shape: torch.Size, path: Path) -> Parameter:
    """Flat pieces as one parameter; what they hold beyond `shape` is padding."""
    found = sum(piece.numel() for piece in pieces)
    if found < shape.numel():
        raise CheckpointError(f"{path.parent} holds {found} of the {shape.numel()} elements of {name}")
    used = tuple(_cut(pieces, 0, shape.numel()))
    dtype = pieces[0].dtype if pieces else torch.float32
    return Parameter(name.removeprefix(_PREFIX), tuple(shape), dtype, used)
