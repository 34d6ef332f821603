"""Adapters under DeepSpeed at every ZeRO stage: steps equal peft's, states cover adapters alone, older ones load."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.programs.trainer.engine_actions import Dump, act
from support.programs.trainer.training import fixed_batch, make_model
from trinity.config.schema.model import LoraConfig, ModelConfig
from trinity.trainer.model.lora import write_adapters
from trinity.trainer.model.policy import load_policy
from trinity.weights.checkpoint_slices import SliceReader
from trinity.weights.lora import Lora, LoraTarget, merged

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

PROBE = [[1, 2, 3, 4, 5, 6, 7], [9, 8], [50, 60, 70, 80, 90, 10, 20, 30, 40, 11, 12]]
KINDS = [(1, 0, "float32"), (1, 3, "bfloat16"), (2, 0, "bfloat16"), (2, 2, "float32"), (2, 3, "float32")]
LORA = {"lora_rank": 3, "lora_alpha": 6}
CHANGES = {
    "model": {"lora_configs": [LORA]},
    "algorithm": {"kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.01}},
}
ACTIONS: list[list[Any]] = [
    ["dump", "start"], ["probe", "base", PROBE], ["train", 1], ["dump", "one"], ["save", "one"], ["trained", "trained"],
    ["whole", "whole one"], ["probe", "one", PROBE], ["train", 2], ["dump", "two"],
    ["load", "one"], ["dump", "one by files"], ["resume", "one"], ["dump", "one by checkpoint"],
    ["train", 2], ["dump", "two again"], ["base"], ["dump", "start again"],
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]} ranks, ZeRO-{kind[1]}, {kind[2]}")
def journey(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    ranks, zero, dtype = request.param
    folder = tmp_path_factory.mktemp("journey")
    dumps, found = act(folder, model, ACTIONS, ranks=ranks, zero=zero, dtype=dtype, changes=CHANGES)
    return dumps, found, dtype, (ranks, zero), folder


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """The first step by peft and torch alone, the whole batch at once; the KL term is 0 then."""
    config = ModelConfig(model_path=str(model), lora_configs=[LoraConfig(**LORA)])
    start = load_policy(config, torch.float32, 64)
    folder = tmp_path_factory.mktemp("adapters")
    assert start.lora is not None
    write_adapters(folder, start.lora, str(model), start.weights())
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = PeftModel.from_pretrained(base, folder, is_trainable=True)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    batch = fixed_batch(1)
    loss, tokens = torch.zeros(()), sum(int(s.mask.sum()) for s in batch.sequences)
    for s in batch.sequences:
        ids = torch.tensor(s.token_ids, dtype=torch.long)[None]
        logs = torch.log_softmax(policy(input_ids=ids).logits[0, :-1], -1)
        new = logs.gather(1, ids[0, 1:, None])[s.prompt_length - 1 :, 0]
        ratio = (new - torch.tensor(s.old_logprobs)).clamp(-20, 20).exp()
        term = torch.maximum(-s.advantage * ratio, -s.advantage * ratio.clamp(0.8, 1.2))
        if s.advantage < 0:
            term = torch.minimum(term, torch.tensor(-s.advantage * 3.0))
        loss = loss + (term * torch.tensor(s.mask, dtype=torch.float32)).sum() / tokens
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 0.5)
    optimizer.step()
    policy.save_pretrained(folder)
    return {name: value.numpy() for name, value in load_file(folder / "adapter_model.safetensors").items()}


def same_bits(one: Dump, other: Dump) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_a_step_is_pefts_own(journey: Any, plain: Dump) -> None:
    dumps, _, dtype, _, _ = journey
    assert dumps["one"].keys() == plain.keys()
    for name in plain:
        if dtype == "float32":
            # Adam divides by the gradient's size, so a rounding difference of a tiny gradient shows in full.
            np.testing.assert_allclose(dumps["one"][name], plain[name], atol=2e-3, err_msg=name)
            assert np.abs(dumps["one"][name] - plain[name]).mean() < 2e-5, name


def test_only_adapters_have_optimizer_states_and_lie_in_checkpoints(journey: Any, model: Path) -> None:
    dumps, found, _, (ranks, zero), folder = journey
    adapters = sum(value.size for value in dumps["one"].values())
    base = sum(value.numel() for value in load_file(model / "model.safetensors").values())
    shards = ranks if zero else 1
    assert adapters / shards <= found["trained"] < 1.3 * adapters / shards + 64 < base / 2
    saved = SliceReader(folder / "one/slices")
    assert all("lora_" in name for name in saved.index.parameters)
    assert adapters == sum(len(piece) for name, shape in saved.index.parameters.items()
                           for piece in saved.whole("exp_avg", name, shape))  # fmt: skip
    size = sum(path.stat().st_size for path in (folder / "one/slices").iterdir())
    assert 12 * adapters <= size < 4 * base, "a checkpoint holds a float32 master and two moments of adapters alone"


def test_the_reference_is_the_base(journey: Any) -> None:
    """The policy is its own reference until it has learnt something."""
    _, found, _, _, _ = journey
    assert abs(found["train 1"]["kl_loss"]) < 1e-9
    assert found["train 2"]["kl_loss"] > 1e-7


def test_the_whole_model_is_the_base_with_the_adapters_merged(journey: Any, model: Path) -> None:
    dumps, found, dtype, _, _ = journey
    base = {name: value.to(getattr(torch, dtype)) for name, value in load_file(model / "model.safetensors").items()}
    adapters = {name: torch.tensor(value) for name, value in dumps["one"].items()}
    names = [name.removeprefix("base_model.model.").replace(".lora_A", "") for name in adapters if ".lora_A." in name]
    lora = Lora(3, 6.0, tuple(LoraTarget(name, tuple(base[name].shape)) for name in names))
    expected = {name: value.to(getattr(torch, dtype)) for name, value in merged(base.items(), adapters, lora, "cpu")}
    assert dumps["whole one"].keys() == expected.keys()
    assert all(np.array_equal(dumps["whole one"][name], value.float()) for name, value in expected.items())
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, state in (("base", dict(base)), ("one", expected)):
        policy.load_state_dict({key: value.float() for key, value in state.items()}, strict=False)
        for tokens, logprobs in zip(PROBE, found[name], strict=True):
            ids = torch.tensor(tokens)[None]
            with torch.no_grad():
                logs = torch.log_softmax(policy(ids).logits[0, :-1], -1)
            tolerance = 1e-4 if dtype == "float32" else 0.05
            np.testing.assert_allclose(logprobs, logs.gather(1, ids[0, 1:, None])[:, 0], atol=tolerance)


def test_older_adapters_come_back_from_files_from_a_checkpoint_and_as_they_began(journey: Any) -> None:
    dumps, _, _, _, _ = journey
    assert not same_bits(dumps["one"], dumps["two"])
    assert same_bits(dumps["one by files"], dumps["one"])
    assert same_bits(dumps["one by checkpoint"], dumps["one"])
    assert same_bits(dumps["two again"], dumps["two"])
    assert same_bits(dumps["start again"], dumps["start"])
    assert all(value.any() == (".lora_A." in name) for name, value in dumps["start"].items())
