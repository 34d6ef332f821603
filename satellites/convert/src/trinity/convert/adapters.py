"""A checkpoint of adapters, as peft writes them: merged with its base model into a whole one."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from trinity.config.checks.lora import in_four_bits
from trinity.config.experts import TRANSPOSED, model_type_of
from trinity.convert.find import CheckpointError
from trinity.convert.source import Parameter, Source
from trinity.runtime.errors import InvalidInput
from trinity.weights.adapters import WEIGHTS, read_adapters
from trinity.weights.four_bit import MARK, NF4, rounded_base
from trinity.weights.lora import fused, in_model, merged
from trinity.weights.manifest import Manifest, manifest_of_folder


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
        in_nf4 = (safe_open(folder / WEIGHTS, "pt").metadata() or {}).get(MARK) == NF4
        manifest = manifest_of_folder("base", 0, base, checksums=False)
    except (InvalidInput, ValueError, OSError) as error:
        raise CheckpointError(f"{folder} cannot be merged with {base}: {error}") from None
    try:
        lora = found.lora(_shapes(manifest), model_type_of(str(base)) in TRANSPOSED)
    except InvalidInput as error:
        raise CheckpointError(f"{folder} are no adapters of {base}: {error}") from None

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        opened = {info.name: safe_open(base / info.name, "pt") for info in manifest.files}
        for tensor in manifest.tensors:
            yield tensor.name, opened[tensor.file].get_tensor(tensor.name)

    trained_in = next(iter(adapters.values())).dtype if adapters else None

    def parameters() -> Iterator[Parameter]:
        try:
            base_tensors = tensors()
            if in_nf4 and trained_in is not None:
                base_tensors = rounded_base(base_tensors, in_four_bits, trained_in)
            for name, tensor in merged(base_tensors, adapters, lora, "cpu"):
                yield Parameter(name, tuple(tensor.shape), tensor.dtype, (tensor,))
        except (InvalidInput, RuntimeError) as error:
            raise CheckpointError(f"{folder} are no adapters of {base}: {error}") from None

    return Source(f"LoRA adapters, merged with {base}", parameters(), trained_in)


def _shapes(base: Manifest) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's tensors, without `.weight`, by their names in its files and in memory."""
    shapes = {tensor.name: tensor.shape for tensor in base.tensors}
    known = fused({in_model(name): shape for name, shape in shapes.items()}) | fused(shapes)
    return {name.removesuffix(".weight"): shape for name, shape in known.items()}
