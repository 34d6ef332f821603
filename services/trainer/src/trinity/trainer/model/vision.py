"""A vision-language model's hidden states: features of images in place of their placeholders, then the language model.

Placeholders are those of the prompt's images alone: a token of the same id that was sampled stays a token, as in vLLM.
"""

from typing import Any

import torch

from trinity.trainer.data.microbatch import MicroBatch


def has_vision(model: Any) -> bool:
    """Whether a transformers model reads images."""
    return getattr(model.config, "vision_config", None) is not None


def text_model(model: Any) -> Any:
    """The part of a transformers model whose attention is over a sequence's tokens."""
    return model.base_model.language_model if has_vision(model) else model


def freeze_vision(model: Any) -> None:
    """Leave the vision tower as it is; its merger, which makes features of the language model's width, too."""
    model.base_model.visual.requires_grad_(False)


def hidden_states(model: Any, micro: MicroBatch, **kind: Any) -> torch.Tensor:
    """[1, T, H] or [B, L, H]. `kind`: what the language model takes beside embeddings and positions."""
    body = model.base_model
    embedded = body.get_input_embeddings()(micro.input_ids)
    if micro.seen is not None:
        features, deeper = _features(body, micro.seen.pixels, micro.seen.grids)
        flat = embedded.reshape(-1, embedded.shape[-1])
        embedded = flat.index_copy(0, micro.seen.places, features.to(flat.dtype)).view_as(embedded)
        if deeper:
            places = torch.zeros(micro.input_ids.numel(), dtype=torch.bool, device=flat.device)
            places[micro.seen.places] = True
            kind |= {"visual_pos_masks": places.view_as(micro.input_ids), "deepstack_visual_embeds": deeper}
    elif any(parameter.requires_grad for parameter in body.visual.parameters()):
        # Each rank must have a gradient of every weight, or they wait for each other.
        embedded = embedded + 0 * sum(parameter.sum() for parameter in body.visual.parameters())
    states: torch.Tensor = body.language_model(
        inputs_embeds=embedded, position_ids=micro.position_ids, use_cache=False, **kind
    )[0]
    return states


def _features(body: Any, pixels: torch.Tensor, grids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of each token of the images: what stands for its embedding, [M, H], and what is added to its state after each of
    the first layers (DeepStack, arXiv:2406.04334), of Qwen3-VL."""
    found = body.get_image_features(pixels.to(body.visual.dtype), grids)
    deeper = getattr(found, "deepstack_features", None) or ()
    return torch.cat(list(found.pooler_output)), [torch.cat(list(features)) for features in deeper]
