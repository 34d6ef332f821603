"""A checkpoint whose tensors are not those of its model is refused: transformers would begin with random ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from trinity.config.schema.model import ModelConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.engine.critic import load_critic
from trinity.trainer.model.policy import load_policy

pytestmark = pytest.mark.core

SIZE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
FILE = "model.safetensors"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = Qwen2Config(**SIZE, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def without_a_layer(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}


def under_other_names(tensors: Tensors) -> Tensors:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}


def without_a_head(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (without_a_layer, "lacks 12 tensors of Qwen2ForCausalLM, such as model.layers.1.input_layernorm.weight; save"),
        (under_other_names, "such as lm_head.weight; it has others, such as module.lm_head.weight; save the model"),
        (without_a_head, "lacks 1 tensors of Qwen2ForCausalLM, such as lm_head.weight; save the model again"),
    ],
)
def test_missing_tensors_are_named(folder: Path, kept: Any, said: str, weights: bool) -> None:
    save_file(kept(load_file(folder / FILE)), folder / FILE, metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=said):
        load_policy(ModelConfig(model_path=str(folder)), torch.float32, 64, weights=weights)


def test_a_critic_needs_no_head(folder: Path) -> None:
    save_file(without_a_head(load_file(folder / FILE)), folder / FILE, metadata={"format": "pt"})
    load_critic(ModelConfig(model_path=str(folder)), torch.float32)


def test_a_vocabulary_that_only_the_config_has_is_refused(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 99}))
    said = r"has lm_head.weight \[97, 32\], which by its config.json is \[99, 32\]; correct config.json"
    with pytest.raises(InvalidInput, match=said):
        load_policy(ModelConfig(model_path=str(folder)), torch.float32, 64)


def test_what_transformers_raises_is_said_in_one_sentence(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "pad_token_id": 97}))
    with pytest.raises(InvalidInput, match="cannot be loaded: AssertionError: Padding_idx must be within num_embedd"):
        load_policy(ModelConfig(model_path=str(folder)), torch.float32, 64)


def test_adapters_are_no_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(InvalidInput, match="it is a folder of LoRA adapters; give their base model here"):
        load_policy(ModelConfig(model_path=str(folder)), torch.float32, 64)
