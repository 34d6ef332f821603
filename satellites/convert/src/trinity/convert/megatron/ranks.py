"""Whole tensors of Megatron's older folders mp_rank_<tensor rank>[_<pipeline rank>]/model.pt, as veRL wrote them.

Each file is a list with a state dict for each virtual pipeline stage. Layers count from 0 in each stage; the stages
follow one another by virtual stage, then by pipeline rank. Tensor-parallel parts follow one another along a tensor's
rows, or along its columns where the layer takes its input in parts.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trinity.convert.find import CheckpointError
from trinity.convert.megatron.layout import Shapes, Tensors
from trinity.convert.safe_load import load_any

_FOLDER = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(_\d\d\d)?")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_FILE = "model.pt"

_State = dict[str, torch.Tensor]


def ranks_folder(actor: Path) -> Path | None:
    """Returns the folder that holds the ranks' folders: `actor/model`, or `actor` itself."""
    for folder in (actor / "model", actor):
        if folder.is_dir() and any(_FOLDER.fullmatch(path.name) for path in folder.iterdir()):
            return folder
    return None


def open_ranks(folder: Path, shapes: Shapes) -> tuple[str, Tensors]:
    """Returns the sharding of the model and its tensors. Raises CheckpointError if a rank is missing or differs."""
    matches = [match for path in folder.iterdir() if (match := _FOLDER.fullmatch(path.name))]
    if expert := next((match for match in matches if match[3]), None):
        raise CheckpointError(f"{folder / expert[0]} is of an expert-parallel run; these cannot be converted")
    staged = any(match[2] for match in matches)
    tensor_ranks = 1 + max(int(match[1]) for match in matches)
    pipeline_ranks = 1 + max(int(match[2] or 0) for match in matches)

    def path(tensor: int, pipeline: int) -> Path:
        return folder / (f"mp_rank_{tensor:02d}_{pipeline:03d}" if staged else f"mp_rank_{tensor:02d}") / _FILE

    parts = [[_load(path(tensor, stage)) for tensor in range(tensor_ranks)] for stage in range(pipeline_ranks)]
    tensors: dict[str, Any] = {}
    before = 0
    for virtual in range(len(parts[0][0])):
        for stage in range(pipeline_ranks):
            paths = [path(rank, stage) for rank in range(tensor_ranks)]
            before += _add_stage(
                tensors, paths, [part[virtual] if virtual < len(part) else {} for part in parts[stage]], before
            )
    embedding = parts[0][0][0].get("embedding.word_embeddings.weight")
    if embedding is not None and embedding.shape[0] * tensor_ranks < shapes.vocabulary:
        raise CheckpointError(
            f"{path(tensor_ranks, 0)} is missing: the others hold {embedding.shape[0] * tensor_ranks} of "
            f"{shapes.vocabulary} rows of the embedding"
        )
    if before < shapes.layers:
        lost = folder / f"mp_rank_00_{pipeline_ranks:03d}" / _FILE
        raise CheckpointError(f"{lost} is missing: the others hold {before} of {shapes.layers} layers")
    return f"{tensor_ranks} x {pipeline_ranks} ranks (tensor x pipeline)", tensors


def _load(path: Path) -> list[_State]:
    found = load_any(path)
    if not isinstance(found, list) or not found or not all(isinstance(state, dict) for state in found):
        raise CheckpointError(f"{path} holds no list of state dicts")
    return [
        {name: value for name, value in state.items() if "_extra_state" not in str(name)}  # of Transformer Engine
        for state in found
    ]


def _add_stage(tensors: dict[str, Any], paths: list[Path], states: list[_State], before: int) -> int:
    """Add the tensors of one stage, whose layers follow `before` others. Returns how many layers it has."""
    layers = 0
    for path, state in zip(paths, states, strict=True):
        if state.keys() != states[0].keys():
            name = min(state.keys() ^ states[0].keys(), key=str)
            raise CheckpointError(f"{path} does not fit {paths[0]}: {name} is not in both")
        if other := next((name for name, value in state.items() if not isinstance(value, torch.Tensor)), None):
            raise CheckpointError(f"{path} holds a {type(state[other]).__name__} as {other}, not a tensor")
    for name in states[0]:
        plain = re.sub(r"^(module\.)+", "", name)
        if match := _LAYER.fullmatch(plain):
            layers = max(layers, int(match[2]) + 1)
            plain = f"{match[1]}{int(match[2]) + before}{match[3]}"
        tensors[plain] = partial(_joined, plain, [state[name] for state in states])
    return layers


def _joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1 or "layernorm" in name or "layer_norm" in name:
        return parts[0]
    if name.endswith(("linear_proj.bias", "linear_fc2.bias")):
        return parts[0]
    if "linear_fc1" in name:  # the gate and the up projection are cut each
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[index] for index in range(2) for half in halves])
    return torch.cat(parts, dim=1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0)
