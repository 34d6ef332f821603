"""A checkpoint of adapters, as peft writes them: merged with its base model into a whole one."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from trinity.convert.find import CheckpointError
from trinity.convert.source import Parameter, Source
from trinity.runtime.errors import InvalidInput
from trinity.weights import manifest_of_folder
from trinity.weights.adapters import WEIGHTS, read_adapters
from trinity.weights.lora import merged


def has_adapters(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def open_adapters(folder: Path, base: Path | None) -> Source:
    """`base`: the base model's folder, if it is not where the adapters say. Raises CheckpointError."""
    try:
        found = read_adapters(folder)
    except InvalidInput as error:
        raise CheckpointError(str(error)) from None
    base = base or Path(found.base_model).expanduser()
    if not (base / "config.json").is_file():
        raise CheckpointError(f"the base model of {folder} is not in {base}; give it with --base-model-dir")
    try:
        adapters = load_file(folder / WEIGHTS)
        manifest = manifest_of_folder("base", 0, base, checksums=False)
    except (InvalidInput, ValueError, OSError) as error:
        raise CheckpointError(f"{folder} cannot be merged with {base}: {error}") from None

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        opened = {info.name: safe_open(base / info.name, "pt") for info in manifest.files}
        for tensor in manifest.tensors:
            yield tensor.name, opened[tensor.file].get_tensor(tensor.name)

    def parameters() -> Iterator[Parameter]:
        try:
            for name, tensor in merged(tensors(), adapters, found.alpha / found.rank, "cpu"):
                yield Parameter(name, tuple(tensor.shape), tensor.dtype, (tensor,))
        except (InvalidInput, RuntimeError) as error:
            raise CheckpointError(f"{folder} are no adapters of {base}: {error}") from None

    trained_in = next(iter(adapters.values())).dtype if adapters else None
    return Source(f"LoRA adapters, merged with {base}", parameters(), trained_in)
