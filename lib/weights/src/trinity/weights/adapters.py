"""Reads a folder of LoRA adapters in peft's format, without peft and torch."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoints import safetensors_header
from trinity.weights.lora import Lora, Shape, module_of, target_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_A = re.compile(r"base_model\.model\.(.+)\.lora_A\.weight")
_MERGE = "merge them with peft into the model, and give the result as model.model_path"
# Settings under which the sum is not W + alpha / rank * B A.
_OTHER_KINDS = (
    "use_rslora", "use_dora", "use_qalora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save",
    "trainable_token_indices", "layer_replication", "alora_invocation_tokens", "lora_bias",
)  # fmt: skip
# Initialisations that leave the base's weights unchanged; the others subtract the adapters from them.
_INITIALIZED = (True, False, None, "gaussian", "eva", "orthogonal")
_HUB_CACHE = re.compile(r"models--(?:.+--)?(.+?)/snapshots/[^/]+/?$")


@dataclass(frozen=True)
class AdapterFolder:
    """Adapters in a folder. `base_model`: path or hub name in adapter_config.json, which may be empty.

    parameters: names, or their ends, of the experts that are adapted (peft's `target_parameters`).
    """

    folder: Path
    rank: int
    alpha: float
    base_model: str
    shapes: Mapping[str, Shape]
    parameters: tuple[str, ...] = ()

    @property
    def modules(self) -> list[str]:
        """Names of the adapted layers, and of the adapted parameters of experts."""
        found = [match[1] for name in self.shapes if (match := _A.fullmatch(name))]
        return [module_of(name, found, self.parameters) for name in found]

    def lora(self, shapes: Mapping[str, Shape], transposed: bool, model_path: str = "") -> Lora:
        """Returns rank, alpha and targets. Raises InvalidInput for a layer without a shape.

        shapes: of the model's linear layers and experts by name. transposed: experts are [experts, in, out].
        """
        for module in self.modules:
            if module not in shapes:
                model = model_path or "the base model"
                what = f"adapts {module}, no linear layer of {model}; give their own base model"
                raise InvalidInput(str(self.folder / WEIGHTS), what)
        targets = (target_of(module, shapes[module], transposed) for module in self.modules)
        return Lora(self.rank, self.alpha, tuple(targets))

    def check(self, shapes: Mapping[str, Shape], model_path: str, transposed: bool = False) -> None:
        """Raises InvalidInput unless the adapters fit a model. Arguments as in `lora`."""
        base, file = self.base_model, self.folder / WEIGHTS
        if base and _last_part(base).lower() != _last_part(model_path).lower():
            raise InvalidInput(
                str(self.folder / CONFIG),
                f"says that the base model is {base!r}, and model.model_path is {model_path!r}; give that model, or "
                "correct base_model_name_or_path in the file if both are the same",
            )
        expected = self.lora(shapes, transposed, model_path).shapes
        for name in sorted(expected.keys() | self.shapes.keys()):
            if self.shapes.get(name) != expected.get(name):
                found, due = (list(known[name]) if name in known else "not there" for known in (self.shapes, expected))
                what = f"has {name} {found}; rank {self.rank} on {model_path} needs it {due}"
                raise InvalidInput(str(file), f"{what}; give their own base model")


def read_adapters(folder: Path) -> AdapterFolder:
    """Reads the configuration and the header of the weights. Raises InvalidInput naming the file."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        fix = "give a folder that peft's save_pretrained wrote"
        raise InvalidInput(str(path), f"cannot be read: {error}; {fix}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise InvalidInput(str(path), "does not describe LoRA adapters (peft_type LORA)")
    other = next((key for key in _OTHER_KINDS if config.get(key)), None)
    if other is None and config.get("bias") not in (None, "none"):
        other = "bias"
    if other is None and config.get("init_lora_weights") not in _INITIALIZED:
        other = f"init_lora_weights {config['init_lora_weights']!r}"
    if other is not None:
        raise InvalidInput(str(path), f"has {other}, which is not supported here; {_MERGE}")
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    numbers = isinstance(rank, int) and isinstance(alpha, int | float) and bool not in (type(rank), type(alpha))
    if not numbers or rank < 1 or not 0 < alpha < 1e9:
        raise InvalidInput(str(path), f"has r {rank!r} and lora_alpha {alpha!r}; both must be numbers > 0")
    try:
        header = safetensors_header(folder / WEIGHTS)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (InvalidInput, KeyError, TypeError) as error:
        what = str(error).removeprefix(f"{folder / WEIGHTS}: ")
        raise InvalidInput(str(folder / WEIGHTS), f"{what}; save the adapters with peft, as safetensors") from None
    if not shapes:
        raise InvalidInput(str(folder / WEIGHTS), "has no tensors")
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise InvalidInput(str(path), f"has target_parameters {parameters!r}; it must be a list of names")
    base = str(config.get("base_model_name_or_path") or "")
    return AdapterFolder(folder, rank, float(alpha), base, shapes, tuple(parameters))


def why_no_base(model_path: str) -> str:
    """Returns the reason why a folder of adapters is no model to begin with; empty for any other path."""
    if not os.path.isfile(Path(model_path).expanduser() / CONFIG):
        return ""
    what = f"{model_path!r} has {CONFIG}, so it is a folder of LoRA adapters; give their base model here and the"
    return f"{what} folder as model.lora_configs.0.path, or remove that file if its weights have the adapters"


def _last_part(model: str) -> str:
    """Returns the last part of a path or hub name; for a folder in the hub's cache the model's name."""
    cached = _HUB_CACHE.search(model)
    return cached[1] if cached else model.rstrip("/").rpartition("/")[2]
