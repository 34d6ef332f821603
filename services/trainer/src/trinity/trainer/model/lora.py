"""Adds LoRA adapters by peft to the trained model, reads them, and disables them for the reference.

The model's parameters are frozen; only the adapters have gradients and optimizer states. B of new adapters is zero, so
the initial model equals its base, and A is the same on every rank, in every run, after every restart.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trinity.config.checks.lora import PLACE, choose, is_experts
from trinity.config.experts import ADAPTED, TRANSPOSED
from trinity.config.schema.model import LoraConfig
from trinity.runtime.errors import InvalidInput
from trinity.weights.adapters import WEIGHTS, read_adapters
from trinity.weights.four_bit import MARK, NF4
from trinity.weights.lora import Lora, target_of

_ADAPTER = "default"
_PEFT_PREFIX = "base_model.model."
_SEED = 0


def add_adapters(model: Any, config: LoraConfig, dtype: torch.dtype, base_model: str) -> Lora:
    """Adapts the layers that the YAML or the folder of adapters chooses, in place, and freezes everything else.

    The output projection must not be a linear layer at this point. Raises InvalidInput for a layer that does not exist,
    and for a folder of adapters that does not fit the model.
    """
    if config.lora_dtype not in ("auto", str(dtype).removeprefix("torch.")):
        raise InvalidInput(f"{PLACE}.lora_dtype", f"is {config.lora_dtype}, but training is in {dtype}; use auto")
    kind = model.config.get_text_config().model_type
    shapes, transposed = linear_shapes(model, with_experts=kind in ADAPTED), kind in TRANSPOSED
    given = read_adapters(Path(config.path).expanduser()) if config.path else None
    if given is not None:
        given.check(shapes, base_model, transposed)
    chosen, problems = choose(config, shapes, given)
    if problems:
        raise InvalidInput(problems[0].path, problems[0].message)
    targets = (target_of(name, shapes[name], transposed) for name in chosen.modules)
    lora = Lora(chosen.rank, chosen.alpha, tuple(targets))
    inject(model, lora)
    begins_with = given_adapters(config, dtype)
    for name, parameter in adapter_weights(model):
        parameter.data = begins_with[name] if begins_with else parameter.data.to(dtype)
    model.register_state_dict_post_hook(_keep_adapters)
    return lora


def linear_shapes(model: nn.Module, *, with_experts: bool = False) -> dict[str, tuple[int, ...]]:
    """Returns the shape [out, in] of each linear layer that can be adapted, by its name.

    with_experts: also the shapes of the parameters of experts, [experts, out, in], or as the model has them.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if _is_plain(module):
            found[name] = tuple(module.weight.shape)
        elif with_experts:
            own = ((f"{name}.{parameter}", value.shape) for parameter, value in module.named_parameters(recurse=False))
            found |= {parameter: tuple(shape) for parameter, shape in own if is_experts(parameter)}
    return found


def inject(model: Any, lora: Lora, adapter: str = _ADAPTER, seed: int = _SEED) -> None:
    """Adds new adapters to a model, beside those of other names, and freezes everything else.

    A is random by the seed, B is zero.
    """
    peft = _import_peft()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Inside another module: peft replaces targets of mixtures of experts that it knows by others.
        held = _peft_config(peft, lora, "")
        held.target_modules = {f"model.{name}" for name in held.target_modules}
        held.target_parameters = [f"model.{name}" for name in held.target_parameters]
        peft.inject_adapter_in_model(held, nn.ModuleDict({"model": model}), adapter)
    if held.target_parameters:
        from trinity.trainer.model.expert_adapters import compute_by_expert

        compute_by_expert(model, adapter)


def _is_plain(module: nn.Module) -> bool:
    """Returns True for a linear layer. A router of Llama 4 is a subclass that returns a tuple."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def given_adapters(config: LoraConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Reads the adapters in the folder `path` by name; returns an empty dict if no path is configured."""
    from safetensors.torch import load_file

    if not config.path:
        return {}
    return {name: tensor.to(dtype) for name, tensor in load_file(Path(config.path).expanduser() / WEIGHTS).items()}


def _keep_adapters(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
    """Removes frozen weights from a checkpoint: DeepSpeed omits frozen parameters, but not their tied names."""
    for name in [name for name in state if name.startswith(prefix) and ".lora_" not in name]:
        del state[name]


def adapter_weights(model: nn.Module, adapter: str = _ADAPTER) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the adapters of a name under the names of peft's files, layer by layer, A before B."""
    for name, parameter in model.named_parameters():
        module, found, matrix = name.rpartition(".lora_")
        if found and f".{adapter}." in matrix:
            yield f"{_PEFT_PREFIX}{module}.lora_{matrix.replace(f'.{adapter}.', '.')}", parameter


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Makes the model compute as its base.

    The adapters are scaled to zero instead of removed: ZeRO-3 prefetches parameters by the order in which modules run,
    which stays the same.
    """
    layers = [module for module in model.modules() if isinstance(module, _import_peft().tuners.lora.LoraLayer)]
    for layer in layers:
        layer.set_scale(_ADAPTER, 0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(_ADAPTER, 1)


def write_adapters(
    folder: Path,
    lora: Lora,
    base_model: str,
    weights: Iterable[tuple[str, torch.Tensor]],
    in_four_bits: bool = False,
) -> None:
    """Writes a folder for PeftModel.from_pretrained(model, folder). in_four_bits: whether the trained base is."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in weights}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"} | ({MARK: NF4} if in_four_bits else {}))
    _peft_config(_import_peft(), lora, base_model).save_pretrained(str(folder))


def _peft_config(peft: Any, lora: Lora, base_model: str) -> Any:
    """Makes peft's configuration with full names of the layers, so that every version of peft chooses the same ones."""
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=[target.name.removesuffix(".weight") for target in lora.targets if len(target.shape) == 2],
        target_parameters=[target.name for target in lora.targets if len(target.shape) == 3],
        base_model_name_or_path=base_model or None,
        task_type="CAUSAL_LM",
        inference_mode=bool(base_model),
    )


def _import_peft() -> Any:
    try:
        import peft
    except ImportError:
        raise InvalidInput("model.lora_configs", "needs peft: pip install -e '.[lora]'") from None
    return peft
