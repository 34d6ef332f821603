"""model.rope_scaling and rope_theta: trainer, engine and checkpoint have the same positions, which the YAML chose."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.programs.trainer.training import make_gpt2, make_model
from trinity.config.schema.model import ModelConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.engine.checkpoints import write_rope
from trinity.trainer.engine.critic import load_critic
from trinity.trainer.model.policy import PolicyModel, load_policy

pytestmark = pytest.mark.core

TOKENS = torch.arange(3, 60)[None]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CHOICES: list[dict[str, Any]] = [
    {"rope_theta": 500.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": YARN, "rope_theta": 500.0},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def load(folder: Path, **rope: Any) -> PolicyModel:
    return load_policy(ModelConfig.model_validate({"model_path": str(folder), **rope}), torch.float32, 64)


def hidden(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS)[0]
    return found


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_policy_computes_them_and_so_does_its_checkpoint(
    folder: Path, tmp_path: Path, choice: dict[str, Any]
) -> None:
    plain, policy = load(folder), load(folder, **choice)
    assert not torch.allclose(hidden(plain.model.base_model), hidden(policy.model.base_model), atol=1e-4)
    saved = tmp_path / "saved"
    shutil.copytree(folder, saved)
    for _ in range(2):  # a checkpoint that is saved again
        write_rope(saved / "config.json", policy.model.config.rope_parameters)
    again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    torch.testing.assert_close(hidden(again.base_model), hidden(policy.model.base_model))
    next_stage = load(saved, **choice)
    torch.testing.assert_close(hidden(next_stage.model.base_model), hidden(policy.model.base_model))


def test_yarn_is_what_transformers_makes_of_the_same_config_json(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "own")
    file = tmp_path / "own/config.json"
    config = json.loads(file.read_text())
    theta = config.pop("rope_parameters", {}).get("rope_theta", config.get("rope_theta"))
    file.write_text(json.dumps({**config, "rope_theta": theta, "rope_scaling": YARN}))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float32)
    found = load(folder, rope_scaling=YARN)
    torch.testing.assert_close(hidden(found.model.base_model), hidden(expected.base_model))
    assert found.model.config.rope_parameters == AutoConfig.from_pretrained(tmp_path / "own").rope_parameters


def test_a_critic_has_them_only_as_the_policys_model(folder: Path, tmp_path: Path) -> None:
    choice = {"model_path": str(folder), "rope_scaling": YARN}
    own = load_critic(ModelConfig.model_validate(choice), torch.float32)
    other = load_critic(ModelConfig.model_validate({**choice, "critic_model_path": str(folder)}), torch.float32)
    assert own.model.config.rope_parameters["rope_type"] == "yarn"
    assert other.model.config.rope_parameters["rope_type"] == "default"


def test_a_model_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    path = make_gpt2(tmp_path / "gpt2")
    with pytest.raises(InvalidInput, match=r"model\.rope_scaling: is given, and this model has no rotary positions"):
        load(path, rope_scaling=YARN)
