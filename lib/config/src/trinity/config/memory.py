"""Memory of a model's weights, training states and key-value cache, by the number of its parameters.

Adam with float32 masters: 2 bytes of bfloat16 weights a parameter, 4 of gradients, 12 of states; in float32 4, 4 and 8.
ZeRO shares out states (1), gradients too (2), weights too (3); offloading moves states, or weights too, to host memory;
their gradients are there too, and on the GPU until then but under ZeRO 3.
With adapters (LoRA) the base model has only its weights, in four bits 4.13 bits each and whole on every rank. Adapters'
own states are small, and counted only for experts.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trinity.config.plan import Plan
from trinity.config.schema.explorer import RolloutModelConfig

_GIB = 2**30
# GiB of an engine in addition to weights and cache: activations of one step, CUDA graphs, CUDA.
ENGINE_BESIDE_GIB = 4.0
# GiB of a trainer's rank in addition to states and activations: CUDA, NCCL, gradients in flight, logits of a chunk.
TRAINER_BESIDE_GIB = 4.0
_SIZES_OF_LAYERS = {"intermediate_size", "moe_intermediate_size", "num_experts_per_tok"}
_SIZES = _SIZES_OF_LAYERS | {
    "head_dim", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size",
}  # fmt: skip
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes of an element in NF4 with double quantization
_SIZE_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bBmM])(?![a-zA-Z0-9])")


def parameters_of(model_path: str) -> tuple[float, str] | None:
    """Parameters of a model and where the number is from: its folder, or its name (`Qwen2.5-1.5B`). None: unknown."""
    folder = Path(model_path).expanduser()
    found = folder.glob("*.safetensors") if os.path.isdir(folder) else ()
    # Mistral's repositories have the model a second time, in its own form.
    files = [file for file in found if os.path.isfile(file) and not file.name.startswith("consolidated")]
    if files:
        width = 4 if _dtype(folder) == "float32" else 2
        return sum(file.stat().st_size for file in files) / width, "by its files"
    sizes = _SIZE_IN_NAME.findall(model_path.rpartition("/")[2])
    if not sizes:
        return None
    number, unit = sizes[-1]
    return float(number) * (1e9 if unit in "bB" else 1e6), "by its name"


def _model_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")
    return _with_sizes(config) | ({"text_config": _with_sizes(text)} if isinstance(text, dict) else {})


def quantization_of(model_path: str) -> str:
    """Returns the method of a model's quantized weights; "" for none, and if its config.json is not on this machine."""
    found = _model_config(model_folder(model_path)).get("quantization_config")
    return str(found.get("quant_method") or "unknown") if isinstance(found, dict) else ""


def language_model(folder: Path) -> dict[str, Any]:
    """Returns the part of config.json about text; most models that read images have it as `text_config`."""
    config = _model_config(folder)
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _with_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Leaves out wrong sizes: sizes are whole numbers above 0, for MLPs also one for each layer."""
    return {name: value for name, value in config.items() if name not in _SIZES or _is_size(name, value)}


def _is_size(name: str, value: Any) -> bool:
    sizes = value if isinstance(value, list) and name in _SIZES_OF_LAYERS else [value]
    return all(type(size) is int and 0 < size < 10**9 for size in sizes)


def experts_of(config: Mapping[str, Any]) -> int:
    """Returns the number of a layer's experts, by a language model's config.json; 0 for other models."""
    found = next((config[name] for name in _EXPERTS if config.get(name)), 0)
    return found if type(found) is int and 0 < found < 10**6 else 0


def vocabulary_of(model_path: str) -> int:
    """Token ids of the model are below this number; 0 where its config.json is not on this machine or does not say.

    A model with a hub name is found in Hugging Face's cache.
    """
    size = language_model(model_folder(model_path)).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else 0


def has_delta_networks(model_path: str) -> bool:
    """Returns True if layers of the model, on this machine, are gated delta networks (Qwen3-Next, Qwen3.5)."""
    return "linear_conv_kernel_dim" in language_model(model_folder(model_path))


def model_folder(model_path: str) -> Path:
    """Returns the folder of the model's files, which need not exist; for a hub name, the newest fetched revision."""
    folder = Path(model_path).expanduser()
    return folder if os.path.isdir(folder) else _cached(model_path)


def _cached(hub_name: str) -> Path:
    """Returns the newest fetched revision of a model in Hugging Face's cache, or None."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    found = (cache / f"models--{hub_name.replace('/', '--')}").glob("snapshots/*/config.json")
    return max(found, key=lambda file: file.lstat().st_mtime, default=cache / "none" / "config.json").parent


def _dtype(folder: Path) -> str:
    config = _model_config(folder)
    return str(config.get("dtype") or config.get("torch_dtype") or "")


@dataclass(frozen=True)
class Sharding:
    """The sharding of training states, and the memory that keeps them."""

    ranks: int
    zero_stage: int
    offload_optimizer: bool = False
    offload_param: bool = False

    @classmethod
    def of(cls, plan: Plan, ranks: int) -> "Sharding":
        chosen = plan.config.trainer.deepspeed
        return cls(ranks, chosen.zero_stage, chosen.offload_optimizer, chosen.offload_param)

    def without_offload(self) -> "Sharding":
        return replace(self, offload_optimizer=False, offload_param=False)

    def smaller(self) -> "Iterator[tuple[str, Sharding]]":
        """Yields settings that take less of a GPU's memory, the fastest first: (keys to set, sharding)."""
        place, stage = "trainer.deepspeed", max(self.zero_stage, 2)
        if self.ranks > 1 and self.zero_stage < 3:
            yield f"{place}.zero_stage 3", replace(self, zero_stage=3)
        if not self.offload_optimizer:
            asked = "" if self.zero_stage else f"{place}.zero_stage 2 and "
            yield f"{asked}{place}.offload_optimizer", replace(self, zero_stage=stage, offload_optimizer=True)
        if not self.offload_param:
            asked = f"{place}.zero_stage 3, offload_optimizer and offload_param"
            yield asked, Sharding(self.ranks, 3, offload_optimizer=True, offload_param=True)


def _moments(plan: Plan) -> float:
    """Bytes of an optimizer's states per parameter; the embeddings of Muon have AdamW's."""
    return {"adamw": 8.0, "muon": 4.0, "adamw_8bit": 2.0}[plan.config.algorithm.optimizer.optimizer_type]


def _bytes(plan: Plan) -> tuple[float, float, float]:
    """Bytes of weights, gradients and states for each trained number."""
    moments = _moments(plan)
    return (4.0, 4.0, moments) if plan.config.trainer.deepspeed.dtype == "float32" else (2.0, 4.0, 4.0 + moments)


def _trained(plan: Plan) -> float:
    """Trained numbers for each parameter of the model: 1, or those of adapters of experts.

    Each expert has A and B of its two parameters: rank x (2 hidden + 3 intermediate) numbers.
    """
    lora = plan.config.model.lora
    if lora is None:
        return 1.0
    experts, hidden, inner, count = _mixture(plan.config.model.model_path)
    return experts * lora.rank * (2 * hidden + 3 * inner) / count if lora.names_experts and count else 0.0


def _in_four_bits(plan: Plan) -> float:
    """The share of the model's parameters that the trainer holds in four bits: not embeddings, heads and experts."""
    path = plan.config.model.model_path
    if not plan.config.model.in_four_bits:
        return 0.0
    experts, hidden, inner, count = _mixture(path)
    config = language_model(model_folder(path))
    ends = vocabulary_of(path) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return max(0.0, 1 - (ends + 3 * experts * hidden * inner) / count) if count else 1.0


def _mixture(path: str) -> tuple[int, int, int, float]:
    """Returns the experts of all layers (0: none), hidden and an expert's intermediate size, and all parameters."""
    config, known = language_model(model_folder(path)), parameters_of(path)
    experts = experts_of(config) * int(config.get("num_hidden_layers") or 0)
    inner = _largest(config.get("moe_intermediate_size")) or _largest(config.get("intermediate_size"))
    return experts, int(config.get("hidden_size") or 0), inner, known[0] if known else 0.0


def _reference(plan: Plan) -> float:
    """Bytes a parameter of a frozen copy, whole on every rank; with adapters it is the policy itself."""
    return _bytes(plan)[0] if plan.algorithm.needs_reference and plan.config.model.lora is None else 0.0


def _shared(plan: Plan, sharding: Sharding) -> tuple[float, float, float]:
    """Bytes a parameter on one rank of weights, gradients and states, wherever they are kept."""
    (weights, gradients, states), trained, held = _bytes(plan), _trained(plan), _in_four_bits(plan)
    frozen = 0.0 if plan.config.model.lora is None else 1 - held
    return (
        weights * (frozen + trained) / (sharding.ranks if sharding.zero_stage >= 3 else 1) + held * _FOUR_BITS,
        gradients * trained / (sharding.ranks if sharding.zero_stage >= 2 else 1),
        states * trained / (sharding.ranks if sharding.zero_stage >= 1 else 1),
    )


def _reference_visits(plan: Plan) -> bool:
    """Tells if the reference is in host memory, and on the GPU only while it computes, without gradients there."""
    return plan.config.trainer.deepspeed.offload_reference


def training_gib(plan: Plan, count: float, sharding: Sharding) -> float:
    """GiB on one rank's GPU without activations: weights, gradients, states, and a reference model."""
    away = sharding.offload_optimizer and sharding.zero_stage >= 3
    gradients = 0.0 if away else _shared(plan, sharding)[1]
    visitor = _reference(plan) if _reference_visits(plan) else 0.0
    return certain_gib(plan, count, sharding) + count * max(gradients, visitor) / _GIB


def certain_gib(plan: Plan, count: float, sharding: Sharding) -> float:
    """GiB that stay on a rank's GPU: training_gib without gradients. A critic is as large as the policy."""
    weights, _, states = _shared(plan, sharding)
    held = (0 if sharding.offload_param else weights) + (0 if sharding.offload_optimizer else states)
    stays = 0.0 if _reference_visits(plan) else _reference(plan)
    return count * (held * (2 if plan.algorithm.critic else 1) + stays) / _GIB


def host_gib(plan: Plan, count: float, sharding: Sharding) -> float:
    """GiB that a rank keeps in host memory."""
    weights, gradients, states = _shared(plan, sharding)
    held = (weights if sharding.offload_param else 0) + (gradients + states if sharding.offload_optimizer else 0)
    away = _reference(plan) if _reference_visits(plan) else 0.0
    return count * (held * (2 if plan.algorithm.critic else 1) + away) / _GIB


def cpu_gib(plan: Plan, count: float) -> float:
    """GiB of training and an engine together on one CPU, in float32."""
    trains, explores = plan.config.mode in ("both", "train"), not plan.offline and plan.config.mode != "train"
    held, states = _in_four_bits(plan), (8.0 + _moments(plan)) * _trained(plan)
    if plan.config.model.lora is not None:
        training = states + 4.0 * (1 - held) + held * _FOUR_BITS
    else:
        training = states + (4.0 if plan.algorithm.needs_reference else 0.0)
    return count * (training * trains + 4.0 * explores) / _GIB


def checkpoint_gib(plan: Plan, count: float) -> float:
    """GiB of a checkpoint on disk: float32 weights and moments of all ranks, and a folder of Hugging Face or peft."""
    weights = _bytes(plan)[0]
    own = (4.0 + _moments(plan)) * _trained(plan)
    if plan.config.model.lora is not None:
        return count * (own + weights * _trained(plan)) / _GIB
    own *= 2 if plan.algorithm.critic else 1
    return count * (own + (weights if plan.config.trainer.save_hf_checkpoint != "never" else 0.0)) / _GIB


def version_gib(plan: Plan, count: float) -> float:
    """GiB of a published version of the weights."""
    return count * _bytes(plan)[0] * _trained(plan) / _GIB


def weights_gib(count: float, model: RolloutModelConfig) -> float:
    """GiB of an engine on each of its GPUs."""
    return count * (4.0 if model.dtype == "float32" else 2.0) / model.tensor_parallel_size / _GIB


def cache_gib(model_path: str, tokens: int, parallel: int) -> float:
    """KV cache of `tokens` tokens on each GPU of an engine, in GiB; 0 where the model's shape is not known."""
    return tokens * _cache_bytes(model_path, parallel) / _GIB


def tokens_in(model_path: str, gib: float, parallel: int) -> int:
    """Tokens whose keys and values fit; 0 where the model's shape is not known."""
    each = _cache_bytes(model_path, parallel)
    return int(gib * _GIB / each) if each else 0


def activation_bytes(shape: Any, recompute: bool | str, lean: bool = False) -> float:
    """Bytes per token in bfloat16, kept until the backward pass; 0 where the model's shape is not known.

    `shape` has a transformers config's fields. A layer keeps 12 hidden states (8 where it is lean: norms and gates are
    fused) and 2 intermediate states. With recompute of whole layers (True) it keeps its input, and one layer at a time
    holds all states; with recompute of MLPs ("mlp") the intermediate states go.
    """
    hidden, layers = getattr(shape, "hidden_size", None), getattr(shape, "num_hidden_layers", None)
    if not hidden or not layers:
        return 0.0
    inner = _largest(getattr(shape, "intermediate_size", None)) or 4 * hidden
    experts = _largest(getattr(shape, "num_experts_per_tok", None))
    inner = max(inner, experts * (_largest(getattr(shape, "moe_intermediate_size", None)) or inner))
    whole = 24 * hidden + 6 * inner  # with the tensors of its backward pass
    if recompute is True:
        return float(2 * hidden * layers + whole)
    return float(((16 if lean else 24) * hidden + (0 if recompute == "mlp" else 4 * inner)) * layers + whole)


def recomputing_gib(model_path: str, tokens: int) -> float:
    """Activations of a micro-batch whose layers are recomputed, in GiB; 0 where the model's shape is not known."""
    config = language_model(Path(model_path).expanduser())
    return tokens * activation_bytes(SimpleNamespace(**config), True) / _GIB


def _largest(size: Any) -> int:
    """The maximum of a size of a model's layers, which may be a list; 0 where there is none."""
    return max(size, default=0) if isinstance(size, list | tuple) else int(size or 0)


def _cache_bytes(model_path: str, parallel: int) -> float:
    """A token's keys and values in bfloat16: 2 x layers x key-value heads x width x 2 bytes, shared by the GPUs."""
    config = language_model(Path(model_path).expanduser())
    heads = config.get("num_attention_heads")
    if not heads or not config.get("hidden_size") or not config.get("num_hidden_layers"):
        return 0.0
    width = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 4.0 * config["num_hidden_layers"] * max(kv_heads / parallel, 1) * width
