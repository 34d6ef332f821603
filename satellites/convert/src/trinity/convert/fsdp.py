"""Whole parameters from FSDP shards as veRL writes them: model_world_size_<W>_rank_<r>.pt, a state dict per rank.

An entry is a DTensor, which says on which coordinate of its mesh the rank was and how each dimension of the mesh
places the tensor (cut, or the same everywhere), or a plain tensor that is whole on every rank. Several cuts nest in
the order of the mesh's dimensions.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from trinity.convert.find import CheckpointError
from trinity.convert.safe_load import Mesh, Replicate, Shard, ShardedTensor, Spec, load_safely
from trinity.convert.source import Parameter, Source, same_storage

_NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
# What wrappers put into the names of parameters.
_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")

_State = Mapping[str, torch.Tensor]


def has_shards(folder: Path) -> bool:
    return any(_NAME.fullmatch(path.name) for path in folder.iterdir())


def open_fsdp(folder: Path) -> Source:
    """Raises CheckpointError if a rank's file is missing or holds what cannot be merged."""
    world = _world_size(folder)
    paths: list[Path] = []
    for rank in range(world):
        paths.append(folder / f"model_world_size_{world}_rank_{rank}.pt")
        if not paths[-1].exists():
            raise CheckpointError(f"{paths[-1]} is missing")
    states = [load_safely(path) for path in paths]
    for path, state in zip(paths, states, strict=True):
        _check(path, state, states[0])
    if world > 1 and not any(isinstance(tensor, ShardedTensor) for tensor in states[0].values()):
        raise CheckpointError(f"{paths[0]} does not say how its tensors were cut (it holds no DTensor)")
    local = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in states[0].items()}
    shared = {_plain(name): _plain(first) for name, first in same_storage(local).items()}
    kind = f"FSDP, {world} rank{'s' * (world > 1)}"
    return Source(kind, _parameters(paths, states, shared), None, shared)


def _world_size(folder: Path) -> int:
    sizes = {int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    if len(sizes) > 1:
        try:
            said = json.loads((folder / "fsdp_config.json").read_text())["world_size"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            said = None
        if said not in sizes:
            listed = ", ".join(str(size) for size in sorted(sizes))
            raise CheckpointError(f"{folder} holds shards of world sizes {listed}; remove those of an older run")
        return int(said)
    return sizes.pop()


def _check(path: Path, state: _State, first: _State) -> None:
    if state.keys() != first.keys():
        name = min(state.keys() ^ first.keys(), key=str)
        raise CheckpointError(f"{path} does not fit the other ranks' files: {name} is not in all of them")
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{path} holds a {type(tensor).__name__} as {name}, not a tensor")
        if "lora_" in name:
            raise CheckpointError(f"{path} holds LoRA adapters ({name}); merge them into the model first")


def _plain(name: str) -> str:
    return _WRAPPERS.sub("", name)


def _parameters(paths: list[Path], states: Sequence[_State], shared: Mapping[str, str]) -> Iterator[Parameter]:
    for name, tensor in states[0].items():
        plain = _plain(name)
        if plain not in shared:
            pieces = [tensor]
            if isinstance(tensor, ShardedTensor):
                pieces = _merge(name, tensor, paths, [state[name] for state in states])
            yield Parameter(plain, tuple(tensor.shape), pieces[0].dtype, tuple(pieces))


def _merge(name: str, first: ShardedTensor, paths: list[Path], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Pieces of the whole tensor in the order of its rows."""
    shards: dict[tuple[int, ...], torch.Tensor] = {}
    for path, part in zip(paths, parts, strict=True):
        shards.setdefault(_coordinate(name, path, part), part._local_tensor)  # type: ignore[attr-defined]
    placements = first._spec.state["placements"]
    sizes = [max(each) + 1 for each in zip(*shards, strict=True)]

    def rows(at: tuple[int, ...]) -> list[torch.Tensor]:
        if len(at) == len(sizes):
            if at not in shards:
                raise CheckpointError(f"{paths[0].parent} holds no shard {at} of {name}")
            return [shards[at]]
        placement = placements[len(at)]
        if isinstance(placement, Replicate):
            return rows((*at, 0))
        cut = [rows((*at, index)) for index in range(sizes[len(at)])]
        dim = placement.state["dim"]
        if dim == 0:
            return [piece for pieces in cut for piece in pieces]
        return [torch.cat([torch.cat(pieces) for pieces in cut], dim=dim)]

    pieces = rows(())
    found = sum(piece.numel() for piece in pieces)
    if found != first.numel() or any(piece.shape[1:] != first.shape[1:] for piece in pieces):
        raise CheckpointError(f"{paths[0].parent}: the shards of {name} do not make its shape {list(first.shape)}")
    return pieces


def _coordinate(name: str, path: Path, part: torch.Tensor) -> tuple[int, ...]:
    """Returns the place on the mesh of the rank that wrote `part`. Raises CheckpointError if the file has none."""
    spec = getattr(part, "_spec", None)
    mesh = spec.state.get("mesh") if isinstance(spec, Spec) else None
    found = mesh.state.get("_coordinate_on_dim") if isinstance(mesh, Mesh) else None
    placements = spec.state.get("placements") if isinstance(spec, Spec) else None
    if not isinstance(found, (list, tuple)) or not isinstance(placements, (list, tuple)):
        raise CheckpointError(f"{path} does not say which part of {name} it holds")
    if len(found) != len(placements) or not all(_known(placement) for placement in placements):
        kinds = ", ".join(type(placement).__name__ for placement in placements)
        raise CheckpointError(f"{path} places {name} as ({kinds}), which cannot be merged")
    return tuple(found)


def _known(placement: object) -> bool:
    return isinstance(placement, Replicate) or (isinstance(placement, Shard) and "dim" in placement.state)
