"""LoRA adapts a mixture's experts one by one: as a plain loop computes, as peft reads, as files are merged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, Family, make_model
from models.test_families_compute_as_transformers import CLOSE, assert_merged, by_policy, cases, policy_of, sequences
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.programs.trainer.engine_actions import act
from trinity.cli.supervise.checks.adapters import _linear_layers
from trinity.config.experts import ADAPTED
from trinity.config.schema.model import LoraConfig
from trinity.convert.adapters import open_adapters
from trinity.runtime.errors import InvalidInput
from trinity.trainer.model.expert_adapters import grouped
from trinity.trainer.model.lora import linear_shapes, write_adapters
from trinity.trainer.model.policy import PolicyModel, load_policy
from trinity.weights.lora import Lora

MIXTURES = [one for one in FAMILIES if one.has_experts]
KNOWN = [one for one in MIXTURES if one.kind in ADAPTED]
TEXT = [one for one in KNOWN if not one.has_tower]
EXPERTS, RANK = 4, 4
TARGETS = r".*[.]experts[.].*|.*_proj"


def adapters_of(family: Family, folder: Path, **others: Any) -> PolicyModel:
    """A policy whose adapters are not zero."""
    make_model(family, folder)
    return disturbed(policy_of(folder, False, LoraConfig(**{"lora_rank": RANK, "lora_alpha": 6, **others})))


def disturbed(policy: PolicyModel) -> PolicyModel:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, adapter in policy.weights():
            adapter.add_(torch.randn(adapter.shape, generator=generator) * 0.1)
    return policy


def layer_of(policy: PolicyModel) -> tuple[str, Any, Any]:
    """The last layer with experts: its name, its module, and transformers' own experts in it."""
    name = [name for name, _ in policy.model.named_modules() if name.endswith(".experts")][-1]
    module = policy.model.get_submodule(name)
    return name, module, module.get_base_layer()


def plain_experts(own: Any, adapters: dict[str, tuple[Any, ...]], scale: float, *inputs: torch.Tensor) -> torch.Tensor:
    """transformers' formula, token by token, with W + scale B A of the expert in place of W."""
    states, chosen, weights = inputs
    whole = {}
    for name in ("gate_up_proj", "down_proj"):
        a, b = adapters[name]
        for expert in range(EXPERTS):
            delta = b[:, expert::EXPERTS] @ a[expert * RANK : (expert + 1) * RANK] * scale
            base = getattr(own, name)[expert]
            whole[name, expert] = (base.T if own.is_transposed else base) + delta
    sums = []
    for token, experts, shares in zip(states, chosen, weights, strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(experts.tolist(), shares, strict=True):
            inner = whole["gate_up_proj", expert] @ token
            inner = own._apply_gate(inner + own.gate_up_proj_bias[expert] if own.has_bias else inner)
            outer = whole["down_proj", expert] @ inner
            total = total + share * (outer + own.down_proj_bias[expert] if own.has_bias else outer)
        sums.append(total)
    return torch.stack(sums)


@pytest.mark.parametrize("family", cases(KNOWN))
def test_experts_compute_as_a_plain_loop_in_float64(family: Family, tmp_path: Path) -> None:
    policy = adapters_of(family, tmp_path, target_modules=["experts"]).double()
    name, module, own = layer_of(policy)
    assert {own.is_transposed, own.has_bias} == {family.kind == "gpt_oss"}
    weights = dict(policy.weights())
    layer = f"base_model.model.{name}"
    adapters: dict[str, tuple[Any, ...]] = {
        "gate_up_proj": tuple(weights[f"{layer}.base_layer.lora_{one}.weight"] for one in "AB"),
        "down_proj": tuple(weights[f"{layer}.lora_{one}.weight"] for one in "AB"),
    }
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(29, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    shares = torch.rand(29, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:2] for _ in range(29)])  # none for the last
    slope = torch.randn(29, 32, generator=generator, dtype=torch.float64)
    trained = [states, shares, *adapters["gate_up_proj"], *adapters["down_proj"]]
    assert policy.lora is not None and policy.lora.scale == 1.5
    expected = plain_experts(own, adapters, policy.lora.scale, states, chosen, shares)
    found = module(states, chosen, shares)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    slopes = [torch.autograd.grad((one * slope).sum(), trained) for one in (found, expected)]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)
        assert other.abs().max() > 1e-3
    assert not any(weight.requires_grad for weight in own.parameters())
    with policy.base():
        torch.testing.assert_close(module(states, chosen, shares), own_forward(own, states, chosen, shares))


def own_forward(own: Any, *inputs: torch.Tensor) -> torch.Tensor:
    return type(own).forward.__wrapped__(own, *inputs)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [3, 16])  # rows of 3 numbers are not aligned
def test_a_grouped_product_is_a_loop(rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(20, 16, dtype=dtype), torch.randn(4, 16, rank, dtype=dtype)
    rows.requires_grad_(), weight.requires_grad_()
    ends = torch.tensor([5, 5, 19, 20], dtype=torch.int32)
    expected = torch.cat([rows[:5] @ weight[0], rows[5:19] @ weight[2], rows[19:] @ weight[3]])
    found = grouped(rows, weight, ends)
    torch.testing.assert_close(found, expected)
    slope = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad(y, (rows, weight), slope) for y in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("targets", [TARGETS, ["experts.down_proj"], ["experts.gate_up_proj"]], ids=str)
@pytest.mark.parametrize("family", cases(KNOWN))
def test_merged_experts_are_the_trained_model(family: Family, targets: Any, tmp_path: Path) -> None:
    assert_merged(family, tmp_path, LoraConfig(lora_rank=RANK, lora_alpha=8, target_modules=targets))


@pytest.mark.parametrize("family", cases(KNOWN))
def test_a_folder_of_adapters_is_read_again_and_converted(family: Family, tmp_path: Path) -> None:
    policy = adapters_of(family, tmp_path / "base", target_modules=TARGETS)
    lora: Any = policy.lora
    write_adapters(tmp_path / "adapters", lora, str(tmp_path / "base"), policy.weights())
    again = policy_of(tmp_path / "base", False, LoraConfig(path=str(tmp_path / "adapters")))
    assert isinstance(again.lora, Lora) and set(again.lora.targets) == set(lora.targets)
    batch = sequences()
    expected = by_policy(policy, batch)
    torch.testing.assert_close(by_policy(again, batch), expected)
    whole = {one.name: one.pieces[0] for one in open_adapters(tmp_path / "adapters", None).parameters}
    save_file({name: one.contiguous() for name, one in whole.items()}, tmp_path / "base/model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    torch.testing.assert_close(by_policy(policy_of(tmp_path / "base", False), batch), expected, atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize("family", cases(TEXT))
def test_peft_reads_the_adapters(family: Family, tmp_path: Path) -> None:
    policy = adapters_of(family, tmp_path / "base", target_modules=["o_proj", "experts"])
    assert policy.lora is not None
    write_adapters(tmp_path / "adapters", policy.lora, str(tmp_path / "base"), policy.weights())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32, attn_implementation="eager")
    other = PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    kept = {name: one for name, one in other.state_dict().items() if ".lora_" in name}
    assert len(kept) == len(load_file(tmp_path / "adapters/adapter_model.safetensors"))
    found = []
    for one in sequences():
        ids = torch.tensor(one.token_ids, dtype=torch.long)[None]
        logs = torch.log_softmax(other(input_ids=ids, use_cache=False).logits, -1)[0]
        begin = one.length - one.response_length
        found.append(logs[begin - 1 : -1].gather(1, ids[0, begin:, None])[:, 0][: one.response_length])
    torch.testing.assert_close(by_policy(policy, sequences()), torch.cat(found), **CLOSE)


@pytest.mark.parametrize("family", cases(MIXTURES))
def test_check_knows_the_experts_of_the_files_and_others_are_refused(family: Family, tmp_path: Path) -> None:
    """`trinity check` reads names and shapes off the files, the trainer off the model."""
    make_model(family, tmp_path)
    if family in KNOWN:
        model = policy_of(tmp_path, False).model
        found = {name: shape for name, shape in _linear_layers(tmp_path).items() if len(shape) == 3}
        own = linear_shapes(model, with_experts=True).items()
        assert found == {name: shape for name, shape in own if len(shape) == 3} != {}
        return
    assert not any(len(shape) == 3 for shape in _linear_layers(tmp_path).values())
    with pytest.raises(
        InvalidInput, match=r"target_modules: has 'experts', which no linear layer of the model is called"
    ):
        policy_of(tmp_path, False, LoraConfig(target_modules=["experts"]))


@pytest.mark.core
def test_a_model_without_weights_can_be_checked(tmp_path: Path) -> None:
    from trinity.config.schema.model import ModelConfig

    make_model(next(one for one in KNOWN if one.kind == "qwen3_moe"), tmp_path)
    config = ModelConfig(model_path=str(tmp_path), lora_configs=[LoraConfig(target_modules=["experts"])])
    policy = load_policy(config, torch.float32, 7, weights=False)
    assert policy.lora is not None and len(policy.lora.targets) == 4


SHAPES = {"qwen3_moe": [(2, 0), (2, 2), (2, 3)], "gpt_oss": [(2, 3)]}  # ranks and ZeRO stage


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", SHAPES)
def test_ranks_train_experts_as_one_does(kind: str, tmp_path: Path) -> None:
    """With recorded experts replayed, and all layers computed again in the backward pass."""
    model = make_model(next(one for one in KNOWN if one.kind == kind), tmp_path / "model", {"vocab_size": 97})
    sizes = [model.config.num_hidden_layers, model.config.num_experts_per_tok, EXPERTS]
    lora = {"lora_rank": RANK, "target_modules": ["q_proj", "experts"]}

    def trained(folder: str, ranks: int, zero: int) -> tuple[dict[str, Any], dict[str, Any]]:
        changes: dict[str, dict[str, Any]] = {
            "algorithm": {"enable_router_replay": True, "optimizer": {"lr": 1e-3, "weight_decay": 0.0}},
            "model": {"lora_configs": [lora]},
            "trainer": {"gradient_checkpointing": True, "deepspeed": {"zero_stage": zero, "dtype": "float32"}},
        }
        steps: list[list[Any]] = [["dump", "start"], *(["train", step, *sizes] for step in (1, 2, 3))]
        dumps, found = act(
            tmp_path / folder, tmp_path / "model", [*steps, ["dump", "end"], ["whole", "whole"]],
            ranks=ranks, zero=zero, changes=changes,
        )  # fmt: skip
        assert found["train 1"]["router_replayed"] == 1
        return dumps, found

    alone, metrics = trained("alone", 1, 0)
    moved = [name for name, value in alone["end"].items() if (value != alone["start"][name]).any()]
    assert sum(".experts." in name for name in moved) == sum(".experts." in name for name in alone["end"]) > 0
    base = load_file(tmp_path / "model/model.safetensors")
    assert alone["whole"].keys() >= base.keys()
    changed = {name for name, one in base.items() if (torch.from_numpy(alone["whole"][name]) != one).any()}
    assert {name for name in base if ".experts." in name and "bias" not in name} <= changed
    for ranks, zero in SHAPES[kind]:
        found, same = trained(f"{ranks}-{zero}", ranks, zero)
        assert same["train 3"]["grad_norm"] == pytest.approx(metrics["train 3"]["grad_norm"], rel=1e-3)
        for name, value in alone["end"].items():
            assert abs(found["end"][name] - value).max() < 2e-4, f"{name} on {ranks} ranks, ZeRO {zero}"
