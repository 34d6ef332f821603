"""model.rope_scaling reaches vLLM, whose rotary positions are those of transformers, as the trainer has them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from support.programs.trainer.training import make_model
from trinity.explorer.engine.start import config_of
from trinity.explorer.types import EngineOptions

pytestmark = [pytest.mark.extended, pytest.mark.timeout(200)]

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CHOICES: list[dict[str, Any]] = [
    {"rope_theta": 500.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "original_max_position_embeddings": 32},
    {**LLAMA3, "original_max_position_embeddings": 32},
]


@pytest.mark.parametrize("rope", CHOICES, ids=str)
def test_cosines_and_sines_are_those_of_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    options = EngineOptions(str(make_model(tmp_path / "model")), "cpu", 64, rope=rope)
    config = config_of(options)
    own: Qwen2Config = config.model_config.hf_config
    assert {**own.rope_parameters, **rope} == own.rope_parameters
    positions, size = torch.arange(48), own.hidden_size // own.num_attention_heads
    cos, sin = Qwen2RotaryEmbedding(own)(torch.zeros(1, 1, size), positions[None])
    with set_current_vllm_config(config):
        theirs = get_rope(size, own.max_position_embeddings, rope_parameters=own.rope_parameters, dtype=torch.float32)
    expected = torch.cat((cos[0, :, : size // 2], sin[0, :, : size // 2]), -1)
    torch.testing.assert_close(theirs.cos_sin_cache[:48], expected, rtol=1e-5, atol=1e-5)
