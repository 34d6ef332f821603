"""Whole parameters from Megatron's checkpoints of a dense decoder, as veRL and Trinity-RFT write them."""

from pathlib import Path

from trinity.convert.find import CheckpointError
from trinity.convert.megatron.dist import open_dist
from trinity.convert.megatron.layout import parameters, read_shapes
from trinity.convert.megatron.ranks import open_ranks, ranks_folder
from trinity.convert.source import Source

_DIST = "dist_ckpt"


def has_megatron(actor: Path) -> bool:
    return (actor / _DIST).is_dir() or ranks_folder(actor) is not None


def open_megatron(actor: Path, files_of: Path | None) -> Source:
    """`files_of`: the folder with the model's config.json, which says how many heads share a key.

    Raises CheckpointError if a part is missing or what was trained is of another kind.
    """
    if files_of is None:
        missing = actor / "huggingface/config.json"
        raise CheckpointError(f"{missing} is missing; give the base model's folder with --base-model-dir")
    shapes = read_shapes(files_of / "config.json")
    if (actor / _DIST).is_dir():
        folder, kind, tensors = actor / _DIST, "torch_dist", open_dist(actor / _DIST)
    else:
        found = ranks_folder(actor)
        assert found is not None
        folder = found
        kind, tensors = open_ranks(folder, shapes)
    return Source(f"Megatron, {kind}", parameters(folder, tensors, shapes), None)
