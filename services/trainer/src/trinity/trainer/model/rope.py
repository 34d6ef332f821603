"""Rotary positions of the policy's model that the YAML has in place of its config.json's (model.rope_scaling)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity.config.schema.model import ModelConfig
from trinity.data.rope import rope_parameters
from trinity.runtime import files


def config_with_rope(model: ModelConfig) -> dict[str, Any]:
    """The argument `config` of transformers' from_pretrained, where the YAML has other positions; else none."""
    if not model.rope:
        return {}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model.model_path, trust_remote_code=model.trust_remote_code)
    config.rope_parameters = rope_parameters(model.rope, config)
    return {"config": config}


def write_rope(file: Path, parameters: Mapping[str, Any]) -> None:
    """Put them into a model's config.json in place of its own, so that a checkpoint computes what was trained."""
    config = json.loads(file.read_text())
    config = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    files.write_atomic(file, json.dumps({**config, "rope_parameters": dict(parameters)}, indent=2).encode())
