"""A checkpoint of adapters, as peft writes them: merged with its base model into a whole one."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from trinity.cli.convert.source import Parameter, Source
from trinity.cli.errors import CheckpointError
from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.weights import manifest_of_folder
from trinity.weights.lora import merged

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
# What would make another sum than W + alpha / rank * B A.
_OTHER_KINDS = ("use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save")


def has_adapters(folder: Path) -> bool:
    return (folder / _WEIGHTS).is_file()


def open_adapters(folder: Path, base: Path | None) -> Source:
    """`base`: the base model's folder, if it is not where the adapters say. Raises CheckpointError."""
    config = files.read_json(folder / _CONFIG)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{folder / _CONFIG} does not describe LoRA adapters")
    other = next((key for key in _OTHER_KINDS if config.get(key)), None)
    if other is not None:
        raise CheckpointError(f"{folder / _CONFIG} has {other}, which is not supported here; merge them with peft")
    base = base or Path(str(config.get("base_model_name_or_path") or "")).expanduser()
    if not (base / "config.json").is_file():
        raise CheckpointError(f"the base model of {folder} is not in {base}; give it with --base-model-dir")
    try:
        adapters = load_file(folder / _WEIGHTS)
        manifest = manifest_of_folder("base", 0, base, checksums=False)
        scale = float(config["lora_alpha"]) / int(config["r"])
    except (InvalidInput, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{folder} cannot be merged with {base}: {error}") from None

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        opened = {info.name: safe_open(base / info.name, "pt") for info in manifest.files}
        for tensor in manifest.tensors:
            yield tensor.name, opened[tensor.file].get_tensor(tensor.name)

    def parameters() -> Iterator[Parameter]:
        try:
            for name, tensor in merged(tensors(), adapters, scale, "cpu"):
                yield Parameter(name, tuple(tensor.shape), tensor.dtype, (tensor,))
        except (InvalidInput, RuntimeError) as error:
            raise CheckpointError(f"{folder} are no adapters of {base}: {error}") from None

    trained_in = next(iter(adapters.values())).dtype if adapters else None
    return Source(f"LoRA adapters, merged with {base}", parameters(), trained_in)
