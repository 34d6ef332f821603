"""Attention over packed sequences, laid end to end in one row: each attends to itself, and to shared prefixes.

transformers calls `packed_attention` in every layer of a model whose attn_implementation is PACKED. On GPUs it runs a
kernel for sequences of different lengths; on CPUs, and in float32, one scaled_dot_product_attention for each sequence.
Neither holds scores between sequences.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.shared_prefixes import SharedPrefixes
from trinity.trainer.model import sequence_parallel
from trinity.trainer.model.recurrent import Rows, begin_anew_at_sequences, recurrent_layers, rows_of
from trinity.trainer.model.sequence_parallel import SequenceGroup
from trinity.trainer.model.shared_attention import attend_to_shared, one_by_one
from trinity.trainer.model.varlen import kernel_for
from trinity.trainer.model.vision import has_vision

PACKED = "trinity_packed"
KEY = "trainer.use_remove_padding"

_LAYERS = {"full_attention", "sliding_attention"}
_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_KERNEL_WIDTH = 256


@dataclass(frozen=True)
class Packing:
    """Starts of the segments, int32 [segments + 1], and their lengths (MicroBatch); the ranks that share sequences."""

    boundaries: torch.Tensor
    lengths: tuple[int, ...]
    group: SequenceGroup | None = None
    shared: SharedPrefixes | None = None

    @cached_property
    def rows(self) -> Rows:
        """Returns the rows of layers that carry a state."""
        parents = None if self.shared is None else self.shared.parents
        return rows_of(self.lengths, parents, self.boundaries.device)


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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, width], key and value [1, key heads, T, width] -> [1, T, heads, width].

    sliding_window: number of tokens to which a token attends, including itself. softcap, s_aux: cap and sinks of
    `one_by_one`, which kernels do not have. Raises InvalidInput for an unknown addition to the model's attention.
    """
    if others.get("position_bias") is not None:
        raise InvalidInput(KEY, "is true, and the model's attention has position_bias; set it to false")
    states = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    if packing.group is not None:
        states = [packing.group.heads_for_tokens(tensor) for tensor in states]
    q, k, v = states
    width = q.shape[-1]
    additions = softcap is not None or s_aux is not None
    if q.is_cuda and not additions and q.dtype in _KERNEL_DTYPES and width == v.shape[-1] <= _KERNEL_WIDTH:
        mixed = _by_kernel(q, k, v, packing, scaling, sliding_window)
    else:
        parents = None if packing.shared is None else packing.shared.parents
        mixed = one_by_one(q, k, v, packing.lengths, scaling, dropout, sliding_window, parents, softcap, s_aux)
    if packing.group is not None:
        mixed = packing.group.tokens_for_heads(mixed)
    return mixed, None


def _by_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, scaling: float | None, window: int | None
) -> torch.Tensor:
    longest = max(packing.lengths)
    if packing.shared is not None:  # without windows, by check_shared_prompts
        return attend_to_shared(q[0], k[0], v[0], packing.boundaries, longest, packing.shared, scaling)[None]
    before = None if window is None else window - 1
    kernel = kernel_for(q[0], k[0], before)
    return kernel(q[0], k[0], v[0], packing.boundaries, longest, scaling, before)[None]


def choose_attention(model: Any) -> None:
    """Keeps transformers' choice, scaled_dot_product_attention where the model has it, but for capped scores.

    scaled_dot_product_attention ignores the cap.
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")


def why_not_packed(model: Any) -> str | None:
    """Returns the reason why a transformers model's attention cannot be replaced; None if it can."""
    config = model.config.get_text_config()
    with_state = [kind for kind in getattr(config, "layer_types", None) or () if kind not in _LAYERS]
    known = len(list(recurrent_layers(model)))
    if not known and not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} does not let its attention be replaced"
    if len(with_state) != known or (getattr(model, "_is_stateful", False) and not known):
        strange = ", ".join(sorted(set(with_state)))
        return f"{type(model).__name__} has layers that carry a state over a whole row ({strange})"
    return None


def check_sequence_parallel(model: Any, size: int) -> None:
    """Raises InvalidInput for a transformers model whose sequences `size` ranks cannot share."""
    if (reason := why_not_packed(model)) is not None:
        raise InvalidInput(sequence_parallel.KEY, f"needs packed sequences; {reason}")
    if any(recurrent_layers(model)):
        raise InvalidInput(
            sequence_parallel.KEY, f"is {size}, and layers carry a state over a whole sequence; set it to 1"
        )
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        raise InvalidInput(sequence_parallel.KEY, f"is {size}, and the model's attention has sinks; set it to 1")
    sequence_parallel.check_heads(model.config.get_text_config(), size)


def check_shared_prompts(model: Any, packed: bool, longest: int) -> None:
    """Raises InvalidInput for a transformers model whose sequences of up to `longest` tokens cannot share prompts."""
    key, config = "trainer.shared_prompts", model.config.get_text_config()
    if not packed:
        raise InvalidInput(key, "is true, and the model is not packed (the log says why); set it to false")
    if has_vision(model):
        raise InvalidInput(key, "is true, and the model reads images, whose prompts are not shared; set it to false")
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window and window < longest and (not layers or "sliding_attention" in layers):
        raise InvalidInput(key, f"is true, and layers see a window of {window} tokens, less than model.max_model_len, "
                           f"{longest}; set it to false")  # fmt: skip


def replace_attention(model: Any) -> None:
    """Switches the model to packed sequences; each call then requires `packing`."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
    model.set_attn_implementation(PACKED)
    begin_anew_at_sequences(model)
