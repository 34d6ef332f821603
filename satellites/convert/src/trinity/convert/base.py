"""Compares the base model with the trained model: its weights and config.json with the checkpoint's tensors."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity.convert.find import CheckpointError
from trinity.runtime import files
from trinity.weights.lora import fused, in_model
from trinity.weights.manifest import manifest_of_folder

if TYPE_CHECKING:
    from trinity.convert.source import Parameter, Source

_LAYER = re.compile(r"(?:^|\.)(?:model|language_model)\.layers\.(\d+)\.")
_TOWER = re.compile(r"(?:^|\.)(?:visual|vision_\w+)\.")
_EMBEDDING = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?embed_tokens\.weight")


class OtherModel(CheckpointError):
    """The base model is another model than the trained one."""


def compared(source: "Source", base: Path | None, *, gives_config: bool) -> "Source":
    """The source, whose tensors must have the shapes of those of the base model, if that folder has weights.

    `gives_config`: the checkpoint has no config.json, and takes the base model's, which must be of its tensors too.
    Reading on raises OtherModel.
    """
    if base is None:
        return source
    parameters = source.parameters
    if any(base.glob("*.safetensors")):
        parameters = _like_weights(source, base)
    if gives_config:
        parameters = _like_config(parameters, base)
    return replace(source, parameters=parameters)


def with_tower(source: "Source", base: Path | None, actor: Path) -> "Source":
    """The source with the tensors of the base model's vision tower and projector that the checkpoint lacks.

    Checkpoints of runs that train the text alone hold none of them. Reading on raises CheckpointError without a base.
    """
    return replace(source, parameters=_with_tower(source.parameters, base, actor))


def _with_tower(parameters: Iterator["Parameter"], base: Path | None, actor: Path) -> Iterator["Parameter"]:
    from safetensors import safe_open

    from trinity.convert.source import Parameter

    there = set()
    for parameter in parameters:
        there.add(parameter.name)
        yield parameter
    if base is None or not any(base.glob("*.safetensors")):
        if not any(_TOWER.search(name) for name in there):
            what = f"{actor} holds a model that reads images without its vision tower, which was not trained"
            raise CheckpointError(f"{what}; give the base model's folder with --base-model-dir")
        return
    for tensor in manifest_of_folder("base", 0, base, checksums=False).tensors:
        name = in_model(tensor.name)
        if "language_model." not in name and not name.startswith("lm_head.") and not {name, tensor.name} & there:
            with safe_open(base / tensor.file, "pt") as file:
                found = file.get_tensor(tensor.name)
            yield Parameter(name, tuple(found.shape), found.dtype, (found,), keeps_dtype=True)


def _like_weights(source: "Source", base: Path) -> Iterator["Parameter"]:
    manifest = manifest_of_folder("base", 0, base, checksums=False)
    shapes = {name: tuple(t.shape) for t in manifest.tensors for name in (t.name, in_model(t.name))}
    shapes |= fused(shapes)  # of experts, as the trainer holds them
    for parameter in source.parameters:
        shape = shapes.get(parameter.name)
        if parameter.name not in source.shared and shape != parameter.shape and not _is_tied(parameter.name, shape):
            there = f"of shape {list(shape)}" if shape else "not at all"
            raise OtherModel(
                f"--base-model-dir: {base} is another model: it has {parameter.name} {there}, the checkpoint of "
                f"shape {list(parameter.shape)}"
            )
        yield parameter


def _is_tied(name: str, shape: tuple[int, ...] | None) -> bool:
    """Tells if a head is tied; such a head may be missing in one of the models."""
    return shape is None and name.startswith(("lm_head.", "score."))


def _like_config(parameters: Iterator["Parameter"], base: Path) -> Iterator["Parameter"]:
    """Compares with the config: rows and columns of the embedding, and the number of layers, after the last tensor."""
    values = files.read_json(base / "config.json")
    text = values.get("text_config") if isinstance(values, dict) else None
    said: dict[str, Any] = {**values, **(text if isinstance(text, dict) else {})} if isinstance(values, dict) else {}

    def check(key: str, found: int) -> None:
        if type(said.get(key)) is int and said[key] != found:
            raise OtherModel(
                f"--base-model-dir: {base} is another model: its {key} is {said[key]}, the checkpoint has {found}"
            )

    layers = set()
    for parameter in parameters:
        if _EMBEDDING.fullmatch(parameter.name) and len(parameter.shape) == 2:
            check("vocab_size", parameter.shape[0])
            check("hidden_size", parameter.shape[1])
        if layer := _LAYER.search(parameter.name):
            layers.add(layer[1])
        yield parameter
    if layers:
        check("num_hidden_layers", len(layers))
