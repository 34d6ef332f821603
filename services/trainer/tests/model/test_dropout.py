"""Models with dropout are trained without it: training and evaluation give the same log-probabilities."""

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM, Qwen2Config, Qwen2ForCausalLM

from trinity.config.schema.model import ModelConfig
from trinity.trainer.data.microbatch import after_first_token, collate
from trinity.trainer.engine.critic import load_critic
from trinity.trainer.model.policy import disable_dropout, load_policy

pytestmark = pytest.mark.core

SIZE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def gpt2() -> Any:
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def opt() -> Any:
    config = OPTConfig(**SIZE, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64, layerdrop=0.5)
    return OPTForCausalLM(config)


def qwen2() -> Any:
    config = Qwen2Config(**SIZE, intermediate_size=48, num_key_value_heads=2, attention_dropout=0.3)
    return Qwen2ForCausalLM(config)


@pytest.fixture(params=[gpt2, opt, qwen2])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    torch.manual_seed(0)
    request.param().save_pretrained(tmp_path)
    return ModelConfig(model_path=str(tmp_path))


@torch.no_grad()
def twice(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Its outputs in training and in evaluation."""
    micro = collate([after_first_token([3, 14, 15, 92, 65, 35] * 4)], 0)
    found = [model.train(learns)(micro) for learns in (True, False)]
    one, other = (given[0] if isinstance(given, tuple) else given for given in found)
    return one, other


def test_a_policy_that_learns_says_what_one_that_looks_does(config: ModelConfig) -> None:
    policy = load_policy(config, torch.float32, 64)
    assert not torch.equal(*twice(policy))
    with capture_logs() as logs:
        disable_dropout(policy, "policy")
        disable_dropout(policy, "policy")
    assert torch.equal(*twice(policy))
    assert [entry["event"] for entry in logs] == ["trainer.model.dropout"]
    assert all(rate > 0 for rate in logs[0]["was"].values())


def test_so_does_a_critic(config: ModelConfig) -> None:
    critic = load_critic(config, torch.float32)
    torch.nn.init.normal_(critic.head.weight)
    disable_dropout(critic, "critic")
    assert torch.equal(*twice(critic))
