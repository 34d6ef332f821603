"""Rotary positions from the YAML, which replace those of the model's config.json in engine and trainer."""

from collections.abc import Mapping
from typing import Any

from trinity.runtime.errors import InvalidInput


def rope_parameters(override: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """`rope_parameters` of a transformers config, updated with ModelConfig.rope (`override`).

    Raises InvalidInput for a model without rotary positions, or with different positions for kinds of layers.
    """
    own = getattr(config, "rope_parameters", None)
    if not isinstance(own, dict) or "rope_theta" not in own:
        key = "model.rope_scaling" if "rope_type" in override else "model.rope_theta"
        raise InvalidInput(key, "is given, and this model has no rotary positions that are the same in all layers")
    kept = own
    if "rope_type" in override:
        kept = {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if key in own}
    found = {**kept, **override}
    if found.get("rope_type") in ("yarn", "llama3"):
        found.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    return found
