"""Hidden states of a vision-language model: features of images replace placeholders, then the language model runs.

Only tokens at the images' positions are placeholders: a sampled token of the same id stays a token, as in vLLM.
"""

from typing import Any

import torch

from trinity.trainer.data.microbatch import MicroBatch


def has_vision(model: Any) -> bool:
    """Returns True if a transformers model reads images."""
    return getattr(model.config, "vision_config", None) is not None


def text_model(model: Any) -> Any:
    """Returns the language model of a transformers model."""
    return model.base_model.language_model if has_vision(model) else model


def freeze_vision(model: Any) -> None:
    """Freezes the vision tower and its merger, which makes features of the language model's width."""
    model.base_model.visual.requires_grad_(False)


def hidden_states(model: Any, micro: MicroBatch, **kind: Any) -> torch.Tensor:
    """Returns [1, T, H] or [B, L, H]. kind: further arguments of the language model."""
    body, seen = model.base_model, micro.seen
    embedded = body.get_input_embeddings()(micro.input_ids)
    if seen is not None:
        features, *deeper = (found[seen.rows] for found in _features(body, seen.pixels, seen.grids))
        flat = embedded.reshape(-1, embedded.shape[-1])
        embedded = flat.index_copy(0, seen.places, features.to(flat.dtype)).view_as(embedded)
        if deeper:
            places = torch.zeros(micro.input_ids.numel(), dtype=torch.bool, device=flat.device)
            places[seen.places] = True
            kind |= {"visual_pos_masks": places.view_as(micro.input_ids), "deepstack_visual_embeds": deeper}
    elif _ranks_wait_for(body.visual):
        embedded = embedded + 0 * sum(found.sum() for found in _features(body, *_nothing(body.visual, embedded.device)))
    states: torch.Tensor = body.language_model(
        inputs_embeds=embedded, position_ids=micro.position_ids, use_cache=False, **kind
    )[0]
    return states


def _features(body: Any, pixels: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
    """Returns the features of the images' tokens, [M, H], which replace their embeddings.

    For Qwen3-VL further features [M, H] follow, one for each of the first layers, which are added to their states
    (DeepStack, arXiv:2406.04334).
    """
    found = body.get_image_features(pixels.to(body.visual.dtype), grids)
    return [
        torch.cat(list(each)) for each in (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))
    ]


def _ranks_wait_for(tower: Any) -> bool:
    """Returns True if the tower must run on each rank, even without images.

    Ranks reduce the gradients of every weight that learns, and under ZeRO 3 gather each weight where it is used.
    """
    learns = torch.is_grad_enabled()
    return any((learns and weight.requires_grad) or hasattr(weight, "ds_id") for weight in tower.parameters())


def _nothing(tower: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a grey image of one token, as pixels and grid (see Seen)."""
    config, side = tower.config, tower.config.spatial_merge_size
    values = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return torch.zeros(side**2, values, device=device), torch.tensor([[1, side, side]], device=device)
