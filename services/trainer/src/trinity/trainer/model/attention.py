"""Attention over packed sequences: they are laid end to end in one row, and each sees only itself.

transformers calls `packed_attention` in every layer of a model whose attn_implementation is PACKED. On GPUs it is a
kernel for sequences of various length; elsewhere, and in float32, one scaled_dot_product_attention for each sequence:
neither ever holds scores between sequences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from trinity.runtime.errors import InvalidInput
from trinity.trainer.model.sequence_parallel import SequenceGroup
from trinity.trainer.model.varlen import kernel_for

PACKED = "trinity_packed"
KEY = "trainer.use_remove_padding"

_LAYERS = {"full_attention", "sliding_attention"}
_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_KERNEL_WIDTH = 256


@dataclass(frozen=True)
class Packing:
    """Starts of the sequences, int32 [sequences + 1], and their lengths; the ranks that share them, if several."""

    boundaries: torch.Tensor
    lengths: tuple[int, ...]
    group: SequenceGroup | None = None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, width], key and value [1, key heads, T, width] -> [1, T, heads, width].

    sliding_window: a token sees this many tokens including itself. Raises InvalidInput for an unknown addition to the
    model's attention.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise InvalidInput(KEY, f"is true, and the model's attention has {name}; set it to false")
    states = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    if packing.group is not None:
        states = [packing.group.heads_for_tokens(tensor) for tensor in states]
    q, k, v = states
    if _has_kernel(q, v):
        mixed = _by_kernel(q, k, v, packing, scaling, sliding_window)
    else:
        mixed = _one_by_one(q, k, v, packing.lengths, scaling, dropout, sliding_window)
    if packing.group is not None:
        mixed = packing.group.tokens_for_heads(mixed)
    return mixed, None


def _has_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    width = query.shape[-1]
    return query.is_cuda and query.dtype in _KERNEL_DTYPES and width == value.shape[-1] <= _KERNEL_WIDTH


def _by_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, scaling: float | None, window: int | None
) -> torch.Tensor:
    before = None if window is None else window - 1
    kernel = kernel_for(q[0], k[0], before)
    return kernel(q[0], k[0], v[0], packing.boundaries, max(packing.lengths), scaling, before)[None]


def _one_by_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[int, ...],
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> torch.Tensor:
    parts = []
    for one_q, one_k, one_v in zip(
        *(tensor.transpose(1, 2).split(lengths, dim=2) for tensor in (q, k, v)), strict=True
    ):
        mask = _band(one_q.shape[2], window, q.device)
        part = scaled_dot_product_attention(
            one_q, one_k, one_v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling,
            enable_gqa=one_q.shape[1] != one_k.shape[1],
        )  # fmt: skip
        parts.append(part)
    return torch.cat(parts, dim=2).transpose(1, 2)


def _band(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """True where a token sees another, [length, length]; None for plain causal attention."""
    if window is None or length <= window:
        return None
    every = torch.ones(length, length, dtype=torch.bool, device=device)
    return every.tril().triu(1 - window)


def why_not_packed(model: Any) -> str | None:
    """Why a transformers model's attention cannot be replaced, as text; None if it can."""
    config = model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} does not let its attention be replaced"
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if strange or getattr(model, "_is_stateful", False):
        return f"{type(model).__name__} has layers that carry a state over a whole row ({', '.join(strange)})"
    if getattr(config, "attn_logit_softcapping", None):
        return "its config has attn_logit_softcapping"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "its attention has sinks"
    return None


def replace_attention(model: Any) -> None:
    """Switch the model to packed sequences; each call then needs `packing`."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
    model.set_attn_implementation(PACKED)
