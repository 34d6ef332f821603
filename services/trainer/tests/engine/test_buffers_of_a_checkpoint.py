"""A router's correction is a buffer: training does not change it, and a saved model without it routes otherwise."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from support.programs.trainer.engine_actions import act
from support.programs.trainer.training import BASE
from trinity.config import make_plan
from trinity.config.schema import Config
from trinity.trainer.engine.weights import PolicyWeights
from trinity.trainer.model.policy import load_policy
from trinity.trainer.process.ranks import Ranks
from trinity.trainer.replay import differences
from trinity.trainer.weights import write_huggingface_index, write_shards
from trinity.weights.checkpoints import copy_all_but_weights

pytestmark = pytest.mark.core

BUFFER = "model.layers.1.mlp.gate.e_score_correction_bias"
VALUES = torch.tensor([3.001, -3.0, 3.0, -3.0])  # not exact in bfloat16
LORA = {"lora_rank": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        moe_intermediate_size=24, num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config)
    dict(made.named_buffers())[BUFFER].copy_(VALUES)
    made.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("dtype", "lora"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, LORA)],
    ids=["float32", "bfloat16", "lora"],
)  # fmt: skip
def test_a_saved_model_computes_what_its_base_does(
    dtype: torch.dtype, lora: dict[str, Any] | None, model: Path, tmp_path: Path
) -> None:
    config = {**BASE["model"], "model_path": str(model), "lora_configs": [lora] if lora else None}
    plan = make_plan(Config.model_validate({**BASE, "model": config, "checkpoint_root_dir": str(tmp_path)}))
    policy = load_policy(plan.config.model, dtype, 64)
    if lora is None:
        policy.model.model.register_buffer("count", torch.arange(3))
    engine: Any = SimpleNamespace(module=policy, zero_stage=0)
    weights, saved = PolicyWeights(engine, plan, Ranks(0, 1, 0), dtype, torch.device("cpu")), tmp_path / "saved"
    layout, tensors = weights.whole()
    write_huggingface_index(saved, *write_shards(tensors, layout, saved, "model-{:05d}.safetensors"))
    copy_all_but_weights(model, saved)
    tokens = torch.arange(20)[None]
    base, again = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for folder in (model, saved))
    assert torch.equal(dict(again.named_buffers())[BUFFER], VALUES)
    assert torch.equal(base(tokens).logits, again(tokens).logits)
    assert differences(weights.whole()[1], saved)["different"] == {}, "a replay compares them as well"
    if lora is None:
        files = [load_file(file) for file in saved.glob("*.safetensors")]
        assert [file["model.count"].tolist() for file in files if "model.count" in file] == [[0, 1, 2]]
        assert BUFFER not in [tensor.name for tensor in weights.layout()], "engines have it from the base model's files"


def test_it_is_saved_from_weights_that_ranks_share(model: Path, tmp_path: Path) -> None:
    dumps, _ = act(tmp_path / "job", model, [["train", 1], ["whole", "saved"]], ranks=2, zero=3)
    assert dumps["saved"][BUFFER].tolist() == VALUES.tolist()
