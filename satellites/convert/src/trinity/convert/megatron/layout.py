"""A dense decoder in Megatron's names and layouts (megatron-core's GPTModel), as tensors of Hugging Face.

Megatron has query, key and value in one matrix, by groups of heads: the queries of a group, its key, its value. The
gate lies over the up projection in one matrix. The vocabulary may be padded. The parts of the ranks are put together by
dist.py (`dist_ckpt`) and ranks.py (`mp_rank_*`).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trinity.convert.find import CheckpointError
from trinity.convert.source import Parameter
from trinity.runtime import files

Tensors = Mapping[str, Callable[[], torch.Tensor]]
"""Whole tensors by Megatron's name, with the layer's number in the whole model; each is read when it is called."""

_OUTSIDE = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
}
# Within a layer. Several names: the tensor is split.
_INSIDE = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    **{
        f"self_attention.linear_qkv.{kind}": tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv")
        for kind in ("weight", "bias")
    },
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.linear_proj.bias": ("self_attn.o_proj.bias",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    **{f"mlp.linear_fc1.{kind}": (f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}") for kind in ("weight", "bias")},
    "mlp.linear_fc1.weight_w": ("mlp.gate_proj.weight",),
    "mlp.linear_fc1.weight_v": ("mlp.up_proj.weight",),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.linear_fc2.bias": ("mlp.down_proj.bias",),
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Tensors of each layer in addition to the weights of attention and MLP, for the families that can be converted.
_FAMILIES = {
    "llama": (),
    "qwen2": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "qwen3": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
}


@dataclass(frozen=True)
class Shapes:
    """The shapes of the model's tensors by config.json."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    head_size: int
    vocabulary: int
    tied: bool

    def of(self, name: str) -> tuple[int, ...]:
        """The shape of a Hugging Face tensor."""
        module, _, kind = re.sub(r"^model\.layers\.\d+\.", "", name).rpartition(".")
        rows, columns = {
            "self_attn.q_proj": (self.heads * self.head_size, self.hidden),
            "self_attn.k_proj": (self.groups * self.head_size, self.hidden),
            "self_attn.v_proj": (self.groups * self.head_size, self.hidden),
            "self_attn.o_proj": (self.hidden, self.heads * self.head_size),
            "self_attn.q_norm": (self.head_size, 0),
            "self_attn.k_norm": (self.head_size, 0),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
            "model.embed_tokens": (self.vocabulary, self.hidden),
            "lm_head": (self.vocabulary, self.hidden),
        }.get(module, (self.hidden, 0))
        return (rows, columns) if columns and kind == "weight" else (rows,)

    def names(self) -> Iterator[str]:
        """Returns every tensor that the model must have."""
        yield from ("model.embed_tokens.weight", "model.norm.weight", *(() if self.tied else ("lm_head.weight",)))
        inside = [*_FAMILIES[self.family], *(f"self_attn.{part}_proj.weight" for part in "qkvo")]
        inside += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        inside += ["input_layernorm.weight", "post_attention_layernorm.weight"]
        for layer in range(self.layers):
            yield from (f"model.layers.{layer}.{name}" for name in inside)


def read_shapes(path: Path) -> Shapes:
    """Reads a config.json. Raises CheckpointError if a number is missing or the model's family has another layout."""
    config = files.read_json(path)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise CheckpointError(
            f"{path} describes a model of type {family!r}; of Megatron's checkpoints only {', '.join(_FAMILIES)} can "
            "be converted"
        )

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key) or default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{path} has {key} {value!r}, which is no size")
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    return Shapes(
        family=family,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        intermediate=number("intermediate_size"),
        heads=heads,
        groups=number("num_key_value_heads", heads),
        head_size=number("head_dim", max(1, hidden // heads)),
        vocabulary=number("vocab_size"),
        tied=config.get("tie_word_embeddings") is True,
    )


def parameters(folder: Path, tensors: Tensors, shapes: Shapes) -> Iterator[Parameter]:
    """Raises CheckpointError, before the first tensor is read, if one is unknown or missing."""
    plan = {name: _names(folder, name) for name in tensors}
    if shapes.tied:
        plan.pop("output_layer.weight", None)  # the last pipeline stage's copy of the embedding
    made = {new for names in plan.values() for new in names}
    if lacking := next((name for name in shapes.names() if name not in made), None):
        raise CheckpointError(f"{folder} holds nothing that becomes {lacking}")
    return _parameters(folder, tensors, shapes, plan)


def _parameters(
    folder: Path, tensors: Tensors, shapes: Shapes, plan: Mapping[str, tuple[str, ...]]
) -> Iterator[Parameter]:
    for name, names in plan.items():
        whole = tensors[name]()
        for new, tensor in zip(names, _split(folder, name, whole, len(names), shapes), strict=True):
            expected = shapes.of(new)
            if new in ("model.embed_tokens.weight", "lm_head.weight"):
                tensor = tensor[: shapes.vocabulary]
            if tuple(tensor.shape) != expected:
                raise CheckpointError(
                    f"{folder}: {name} makes {new} of shape {list(tensor.shape)}, but config.json says "
                    f"{list(expected)}; a part is missing, or the config is another model's"
                )
            yield Parameter(new, expected, tensor.dtype, (tensor,))


def _names(folder: Path, name: str) -> tuple[str, ...]:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _INSIDE:
        raise CheckpointError(
            f"{folder} holds {name}, which Llama, Qwen2 and Qwen3 do not have; it cannot be converted"
        )
    return tuple(f"model.layers.{match[1]}.{new}" for new in _INSIDE[match[2]])


def _split(folder: Path, name: str, whole: torch.Tensor, count: int, shapes: Shapes) -> list[torch.Tensor]:
    if count == 1:
        return [whole]
    if count == 2:
        return list(whole.chunk(2))
    each = shapes.heads // shapes.groups
    rows = (each + 2) * shapes.head_size
    if whole.shape[0] != rows * shapes.groups:
        raise CheckpointError(
            f"{folder}: {name} has {whole.shape[0]} rows, but the heads of config.json make {rows * shapes.groups}; a "
            "part is missing, or the config is another model's"
        )
    grouped = whole.reshape(shapes.groups, rows, *whole.shape[1:])
    parts = grouped.split([each * shapes.head_size, shapes.head_size, shapes.head_size], dim=1)
    return [part.reshape(-1, *whole.shape[1:]) for part in parts]
