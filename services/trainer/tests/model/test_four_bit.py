"""A base model in four bits: its values are NF4's, and the trainer computes with them as a plain layer would."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from support.programs.trainer.training import make_gpt2, make_model
from trinity.config.checks.lora import in_four_bits
from trinity.config.schema.model import LoraConfig, ModelConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.model.checkpointing import recompute_activations
from trinity.trainer.model.four_bit import FourBitLinear, elements_in_four_bits
from trinity.trainer.model.lora import write_adapters
from trinity.trainer.model.policy import PolicyModel, load_policy
from trinity.weights.four_bit import MARK, NF4, quantize, rounded, rounded_base

pytestmark = pytest.mark.core
pytest.importorskip("bitsandbytes")

TOKENS = torch.tensor([[3, 14, 15, 92, 65, 35], [27, 18, 28, 18, 28, 45]])
VALUES = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]  # fmt: skip (QLoRA, appendix E)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def load(model: Path, dtype: torch.dtype = torch.float32, **lora: Any) -> PolicyModel:
    policy = load_policy(of(model, load_in_4bit=True, **lora), dtype, 64)
    torch.manual_seed(1)
    for _, parameter in policy.weights():
        parameter.data.normal_(std=0.1)
    return policy


def of(model: Path, **lora: Any) -> ModelConfig:
    return ModelConfig(model_path=str(model), lora_configs=[LoraConfig(lora_rank=3, lora_alpha=6, **lora)])


def plain(model: Path, policy: PolicyModel, dtype: torch.dtype = torch.float32) -> PolicyModel:
    """The same adapters on a base whose matrices have the rounded values at full width."""
    made = load_policy(of(model), dtype, 64)
    for name, module in made.model.named_modules():
        if type(module) is nn.Linear and "lora_" not in name:
            module.weight.data = rounded(module.weight.data)
    for (_, mine), (_, theirs) in zip(made.weights(), policy.weights(), strict=True):
        mine.data = theirs.data.clone()
    return made


def hidden(policy: PolicyModel) -> torch.Tensor:
    states: torch.Tensor = policy.model.base_model(input_ids=TOKENS)[0]
    return states


def test_values_are_the_nearest_of_nf4_with_maxima_of_eight_bits() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(48, 100)
    found = rounded(matrix).view(-1, 64)
    blocks, grid = matrix.view(-1, 64), torch.tensor(VALUES)
    maxima = blocks.abs().amax(1)
    codes = ((blocks / maxima[:, None])[..., None] - grid).abs().argmin(-1)
    kept = found.abs().amax(1)  # each block has an element of code 1 or -1
    torch.testing.assert_close(found, grid[codes] * kept[:, None], rtol=1e-6, atol=1e-7)
    spread = (maxima - maxima.mean()).abs().max()
    assert (kept - maxima).abs().max() < 0.02 * spread, "maxima are rounded to a part of their spread"
    assert (kept != maxima).any()
    assert rounded(matrix.bfloat16()).dtype is torch.bfloat16


def test_an_element_takes_four_bits(model: Path) -> None:
    policy = load(model)
    layers = {name: module for name, module in policy.model.named_modules() if isinstance(module, FourBitLinear)}
    assert len(layers) == 2 * 7
    for layer in layers.values():
        assert layer.codes.dtype is torch.uint8 and layer.codes.numel() * 2 == layer.in_features * layer.out_features
        assert layer._state.absmax.dtype is torch.uint8
    kept = load_file(model / "model.safetensors")
    assert elements_in_four_bits(policy) == sum(
        tensor.numel() for name, tensor in kept.items() if in_four_bits(name, tuple(tensor.shape))
    )
    names = {name for name, _ in policy.named_parameters() if ".lora_" not in name}
    assert not any("_proj" in name and "bias" not in name for name in names), "no matrix is kept at full width"
    assert any("embed_tokens" in name for name in names) and any("norm" in name for name in names)


@pytest.mark.parametrize("recompute", [False, True])
def test_outputs_and_gradients_are_those_of_rounded_matrices(model: Path, recompute: bool) -> None:
    policy = load(model).double()
    expected = plain(model, policy).double()
    if recompute:
        recompute_activations(policy.model, True)
    weight = torch.randn(2, 6, 64, dtype=torch.float64)
    for one in (policy, expected):
        one.train()
        states = hidden(one)
        (states * weight[..., : states.shape[-1]]).sum().backward()
    torch.testing.assert_close(hidden(policy), hidden(expected), rtol=1e-10, atol=1e-10)
    for (name, mine), (_, theirs) in zip(policy.weights(), expected.weights(), strict=True):
        assert mine.grad is not None and mine.grad.abs().max() > 0, name
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-9, msg=name)
    with policy.base(), expected.base():
        torch.testing.assert_close(hidden(policy), hidden(expected), rtol=1e-10, atol=1e-10)


def test_the_base_is_the_rounded_one_for_engines_too(model: Path) -> None:
    policy = load(model)
    files = load_file(model / "model.safetensors")
    base = dict(rounded_base(files.items(), in_four_bits, torch.float32))
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found.load_state_dict(base, strict=False)
    for name, module in policy.model.named_modules():
        if isinstance(module, FourBitLinear):
            assert torch.equal(module.weight, base[name.replace(".base_layer", "") + ".weight"]), name
    with policy.base(), torch.no_grad():
        torch.testing.assert_close(hidden(policy), found.base_model(input_ids=TOKENS)[0], rtol=1e-5, atol=1e-5)


def test_every_start_and_number_of_threads_finds_the_same_codes(model: Path) -> None:
    matrix, threads = torch.randn(1024, 1030), torch.get_num_threads()
    found = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            codes, state = quantize(matrix)
            found.append([codes, state.absmax, state.offset, state.state2.absmax])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_conversions_leave_the_scales_in_float32(model: Path) -> None:
    policy = load(model)
    layer = next(module for module in policy.modules() if isinstance(module, FourBitLinear))
    before = layer.weight
    policy.bfloat16()
    assert torch.equal(layer.weight, before) and layer._state.state2.absmax.dtype is torch.float32


def test_adapters_and_checkpoints_have_their_usual_names(model: Path) -> None:
    policy, usual = load(model), load_policy(of(model), torch.float32, 64)
    assert [name for name, _ in policy.weights()] == [name for name, _ in usual.weights()]
    assert policy.lora == usual.lora
    assert policy.state_dict().keys() == usual.state_dict().keys()
    assert policy.fixed() == []


def test_layers_without_adapters_are_held_too(model: Path) -> None:
    policy = load(model, target_modules=["q_proj"])
    assert sum(isinstance(module, FourBitLinear) for module in policy.modules()) == 2 * 7
    assert policy.lora is not None and len(policy.lora.targets) == 2
    hidden(policy).sum().backward()
    assert all(parameter.grad is not None for _, parameter in policy.weights())


@pytest.mark.parametrize("held", [True, False])
def test_files_of_adapters_name_a_base_of_four_bits(model: Path, tmp_path: Path, held: bool) -> None:
    policy = load(model)
    assert policy.lora is not None
    write_adapters(tmp_path, policy.lora, str(model), policy.weights(), in_four_bits=held)
    found = safe_open(tmp_path / "adapter_model.safetensors", "pt").metadata()
    assert found == ({"format": "pt", MARK: NF4} if held else {"format": "pt"})


def test_a_model_of_other_layers_is_refused(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path)
    with pytest.raises(InvalidInput, match=r"load_in_4bit: is true, and transformer\.h\.0\.attn\.c_attn\.weight"):
        load_policy(of(folder, load_in_4bit=True), torch.float32, 64)


def test_a_missing_library_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(InvalidInput, match=r"load_in_4bit: is true, which needs bitsandbytes; `pip install"):
        load_policy(of(model, load_in_4bit=True), torch.float32, 64)


@pytest.mark.parametrize(
    ("name", "shape", "held"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", (64, 64), True),
        ("model.layers.0.self_attn.q_proj.bias", (64,), False),
        ("model.layers.0.input_layernorm.weight", (64,), False),
        ("model.embed_tokens.weight", (512, 64), False),
        ("lm_head.weight", (512, 64), False),
        ("model.layers.0.mlp.gate.weight", (8, 64), False),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 64), False),
        ("model.layers.0.mlp.experts.3.up_proj.weight", (64, 64), False),
        ("model.layers.0.mlp.experts.gate_up_proj", (8, 128, 64), False),
        ("visual.blocks.0.attn.qkv.weight", (64, 64), False),
        ("model.layers.0.linear_attn.conv1d.weight", (64, 1, 4), False),
    ],
)
def test_matrices_of_linear_layers_are_held(name: str, shape: tuple[int, ...], held: bool) -> None:
    assert in_four_bits(name, shape) == held
