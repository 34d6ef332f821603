"""Checks adapters against the model's files, for training and for `trinity serve`."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from trinity.config import Plan, Problem
from trinity.config.checks.lora import PLACE, choose, modules_of, refuse_unmerged
from trinity.config.experts import TRANSPOSED, model_type_of
from trinity.data.vision import has_tower
from trinity.reading.errors import RunError
from trinity.runtime.errors import InvalidInput
from trinity.runtime.process import time_limit
from trinity.weights.adapters import read_adapters
from trinity.weights.lora import fused, in_model
from trinity.weights.manifest import manifest_of_folder

_MOST_REGEX_SECONDS = 5.0


def check_lora(plan: Plan) -> list[Problem]:
    """Checks that the model has the layers to adapt, that explorers can use adapters with its files, and that given
    adapters fit.
    """
    model = plan.config.model
    lora, folder = model.lora, Path(model.model_path).expanduser()
    if lora is None or plan.config.mode not in ("both", "train"):
        return []
    if importlib.util.find_spec("peft") is None:
        return [Problem("model.lora_configs", "needs peft; `pip install -e '.[lora]'`")]
    if lora.load_in_4bit and importlib.util.find_spec("bitsandbytes") is None:
        what = "is true, which needs bitsandbytes; `pip install -e '.[bitsandbytes]'`"
        return [Problem(f"{PLACE}.load_in_4bit", what)]
    try:
        given = read_adapters(Path(lora.path).expanduser()) if lora.path else None
    except InvalidInput as error:
        return [Problem(f"{PLACE}.path", str(error))]
    if not folder.is_dir():
        return []
    try:
        linear = _linear_layers(folder)
    except InvalidInput as error:
        return [Problem("model.model_path", f"adapters are merged with its safetensors files: {error}")]
    try:
        if given is not None:
            given.check(linear, model.model_path, _has_transposed_experts(folder))
        with time_limit(_MOST_REGEX_SECONDS):
            chosen, problems = choose(lora, linear, given)
        return problems if lora.merged else [*problems, *refuse_unmerged(chosen.rank, chosen.modules)]
    except InvalidInput as error:
        return [Problem(f"{PLACE}.path", str(error))]
    except TimeoutError:
        what = f"or exclude_modules is a regex that does not end within {_MOST_REGEX_SECONDS:g} s; give names of layers"
        return [Problem(f"{PLACE}.target_modules", what)]


def served_adapters(given: Sequence[str], plan: Plan) -> dict[str, Path]:
    """Returns the folders to serve by name, from NAME=FOLDER. Raises RunError for adapters that no engine can hold."""
    found: dict[str, Path] = {}
    model = Path(plan.config.model.model_path).expanduser()
    linear = _linear_layers(model) if given and model.is_dir() else None
    for entry in given:
        name, _, folder = entry.partition("=")
        if not name or not folder:
            raise RunError(f"--adapter {entry}: give NAME=FOLDER", 2)
        if name in found or name == plan.config.name:
            raise RunError(f"--adapter {entry}: {name!r} names another model of this endpoint; choose another name", 2)
        found[name] = Path(folder).expanduser().absolute()
        try:
            adapters = read_adapters(found[name])
            if linear is not None:
                adapters.check(linear, plan.config.model.model_path, _has_transposed_experts(model))
        except InvalidInput as error:
            raise RunError(f"--adapter {entry}: {error}", 2) from None
        if problem := next(refuse_unmerged(adapters.rank, adapters.modules), None):
            reason = problem.message.partition(";")[0]
            raise RunError(f"--adapter {entry}: {reason}; merge them into the model by peft, and serve that", 2)
    return found


def _linear_layers(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's linear layers and experts by name. Raises InvalidInput."""
    tensors = manifest_of_folder("base", 0, folder, checksums=False).tensors
    named = in_model if has_tower(str(folder)) else str
    shapes = fused({named(tensor.name): tensor.shape for tensor in tensors})
    chosen = modules_of(((name, len(shape)) for name, shape in shapes.items()), model_type_of(str(folder)))
    return {name: shapes.get(f"{name}.weight") or shapes[name] for name in chosen}


def _has_transposed_experts(folder: Path) -> bool:
    return model_type_of(str(folder)) in TRANSPOSED
