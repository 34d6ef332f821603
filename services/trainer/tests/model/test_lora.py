"""Adapters in the trained model: sums equal peft's, the base is unchanged, unknown names are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from support.programs.trainer.training import make_model
from trinity.config.schema.model import LoraConfig, ModelConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.model.lora import write_adapters
from trinity.trainer.model.policy import PolicyModel, load_policy
from trinity.weights.lora import merged

pytestmark = pytest.mark.core

TOKENS = torch.tensor([[3, 14, 15, 92, 65, 35]])


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=request.param)


def load(model: Path, dtype: torch.dtype = torch.float32, **lora: Any) -> PolicyModel:
    config = ModelConfig(model_path=str(model), lora_configs=[LoraConfig(lora_rank=3, lora_alpha=6, **lora)])
    return load_policy(config, dtype, 64)


def disturb(policy: PolicyModel) -> None:
    """Adapters as they are after some steps: B is not zero."""
    torch.manual_seed(1)
    for _, parameter in policy.weights():
        parameter.data.normal_(std=0.1)


def hidden(policy: PolicyModel) -> torch.Tensor:
    with torch.no_grad():
        states: torch.Tensor = policy.model.base_model(input_ids=TOKENS)[0]
        return states


def whole(model: Path) -> dict[str, torch.Tensor]:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {name: parameter.data for name, parameter in policy.named_parameters()}


def test_what_explorers_merge_is_what_peft_merges(model: Path, tmp_path: Path) -> None:
    policy = load(model)
    disturb(policy)
    assert policy.lora is not None
    write_adapters(tmp_path, policy.lora, str(model), policy.weights())
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, tmp_path).merge_and_unload()
    expected = dict(peft.named_parameters())
    adapters = {name: parameter.data for name, parameter in policy.weights()}
    found = dict(merged(whole(model).items(), adapters, policy.lora, "cpu"))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].data, rtol=1e-6, atol=1e-7, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(hidden(policy), peft.base_model(input_ids=TOKENS)[0], rtol=1e-4, atol=1e-5)


def test_embeddings_heads_and_norms_are_not_touched(model: Path) -> None:
    policy, before = load(model), whole(model)
    disturb(policy)
    assert policy.lora is not None
    targets = {target.name for target in policy.lora.targets}
    assert len(targets) == 2 * 7  # layers, linear layers of each
    adapters = {name: parameter.data for name, parameter in policy.weights()}
    for name, tensor in merged(before.items(), adapters, policy.lora, "cpu"):
        assert torch.equal(tensor, before[name]) == (name not in targets), name


def test_only_adapters_train(model: Path) -> None:
    policy = load(model)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    assert {id(parameter) for parameter in trained} == {id(parameter) for _, parameter in policy.weights()}
    assert len(trained) == 2 * 2 * 7


def test_the_start_is_the_base_and_the_same_every_time(model: Path) -> None:
    torch.manual_seed(5)
    one = load(model)
    torch.manual_seed(6)
    other = load(model)
    plain = load_policy(ModelConfig(model_path=str(model)), torch.float32, 64)
    assert torch.equal(hidden(one), hidden(plain))
    for (name, first), (_, second) in zip(one.weights(), other.weights(), strict=True):
        assert torch.equal(first, second), name
        assert bool(first.any()) == ("lora_A" in name), name


def test_the_reference_is_the_base(model: Path) -> None:
    policy = load(model)
    base = hidden(policy)
    disturb(policy)
    adapted = hidden(policy)
    assert not torch.allclose(adapted, base, atol=1e-3)
    with policy.base():
        assert torch.equal(hidden(policy), base)
    assert torch.equal(hidden(policy), adapted)


def test_training_begins_with_the_adapters_of_a_folder(model: Path, tmp_path: Path) -> None:
    older = load(model, target_modules=["q_proj", "down_proj"])
    disturb(older)
    assert older.lora is not None
    write_adapters(tmp_path / "a", older.lora, str(model), older.weights())
    config = ModelConfig(model_path=str(model), lora_configs=[LoraConfig(path=str(tmp_path / "a"))])
    policy = load_policy(config, torch.float32, 64)
    assert policy.lora == older.lora
    for (name, now), (before, was) in zip(policy.weights(), older.weights(), strict=True):
        assert name == before and torch.equal(now, was) and now.requires_grad, name
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, tmp_path / "a")
    with torch.no_grad():
        expected = peft.base_model.model.model(input_ids=TOKENS)[0]
    torch.testing.assert_close(hidden(policy), expected, rtol=1e-4, atol=1e-5)
    plain = load_policy(ModelConfig(model_path=str(model)), torch.float32, 64)
    with policy.base():
        assert torch.equal(hidden(policy), hidden(plain)), "the reference is the base model"


def test_adapters_of_another_rank_or_model_are_refused(model: Path, tmp_path: Path) -> None:
    older = load(model, target_modules=["q_proj"])
    assert older.lora is not None
    write_adapters(tmp_path / "a", older.lora, "/other/model-7B", older.weights())
    with pytest.raises(InvalidInput, match="the base model is '/other/model-7B'"):
        load(model, path=str(tmp_path / "a"))
    write_adapters(tmp_path / "b", older.lora, str(model), older.weights())
    config = ModelConfig(model_path=str(model), lora_configs=[LoraConfig(path=str(tmp_path / "b"), lora_rank=4)])
    with pytest.raises(InvalidInput, match=r"lora_rank: is 4, and that of the adapters in .* is 3"):
        load_policy(config, torch.float32, 64)


def test_adapters_have_the_dtype_of_training(model: Path) -> None:
    assert {parameter.dtype for _, parameter in load(model, torch.bfloat16).weights()} == {torch.bfloat16}
    with pytest.raises(InvalidInput, match=r"lora_dtype: is bfloat16, but training is in torch\.float32"):
        load(model, lora_dtype="bfloat16")


def test_chosen_layers_alone_are_adapted(model: Path) -> None:
    names, excluded = ["q_proj", "layers.1.mlp.up_proj"], ["layers.0.self_attn.q_proj"]
    chosen = load(model, target_modules=names, exclude_modules=excluded)
    assert chosen.lora is not None
    assert [target.name for target in chosen.lora.targets] == [
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    ]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"target_modules": ["q_prj"]}, r"target_modules: has 'q_prj', .* did you mean \[q_proj\]"),
        ({"target_modules": ["lm_head"]}, "target_modules: has 'lm_head', .* heads are not adapted"),
        ({"target_modules": "up_proj"}, r"target_modules: is 'up_proj', a regex .* did you mean \[up_proj\]"),
        ({"target_modules": "(("}, "target_modules: is '[(][(]', which is no regex"),
        ({"exclude_modules": ["gate"]}, r"exclude_modules: has 'gate', .* did you mean \[gate_proj\]"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "target_modules: and exclude_modules leave no"),
    ],
)
def test_layers_that_are_not_there_are_refused_with_the_nearest(
    model: Path, choice: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        load(model, **choice)
