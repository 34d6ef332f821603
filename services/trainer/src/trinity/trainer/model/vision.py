"""Hidden states of a vision-language model: features of images replace placeholders, then the language model runs.

A model that reads no images runs its language model on text; the rest of it stays frozen.

Only tokens at the images' positions are placeholders: a sampled token of the same id stays a token, as in vLLM.
"""

from typing import Any

import torch

from trinity.trainer.data.microbatch import MicroBatch


def has_vision(model: Any) -> bool:
    """Returns True if a loaded model reads images (policy.from_pretrained)."""
    return bool(getattr(model, "reads_images", False))


def text_body(model: Any) -> Any:
    """Returns the language model of a transformers model, without its head."""
    decoder = model.get_decoder()
    return decoder if decoder.get_output_embeddings() is None else decoder.model  # Llama 4 gives both


def freeze_all_but_text(model: Any) -> None:
    """Freezes towers, and projections from their width to the language model's."""
    parts = [part for part in (text_body(model), model.get_output_embeddings()) if part is not None]
    kept = {id(parameter) for part in parts for parameter in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.requires_grad_(False)


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
