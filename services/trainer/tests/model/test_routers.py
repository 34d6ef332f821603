"""The loss that balances experts is transformers' formula, layer by layer, in every layout of a micro-batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from support.programs.trainer.training import make_model, run_ranks
from trinity.config.schema.model import ModelConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.microbatch import collate
from trinity.trainer.model.checkpointing import recompute_activations
from trinity.trainer.model.policy import load_policy
from trinity.trainer.model.routers import Routers, routers_of

EXPERTS, CHOSEN = 8, 2


def make_mixture(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=16,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.normal_(weight, std=1.0)  # some experts get more tokens than others
    model.save_pretrained(folder)
    return folder


def sequences() -> list[TrainSequence]:
    rng, made = np.random.default_rng(0), []
    for group, (prompt, response) in enumerate([(3, 9), (1, 4), (7, 2)]):
        nothing = np.zeros(response, np.float32)
        tokens = rng.integers(0, 97, prompt + response).astype(np.int32)
        made.append(TrainSequence(tokens, prompt, nothing, nothing == 0, group=group))
    return made


@pytest.mark.core
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_and_its_gradient_are_transformers(packed: bool, recompute: bool, tmp_path: Path) -> None:
    make_mixture(tmp_path)
    policy = load_policy(ModelConfig(model_path=str(tmp_path)), torch.float32, 64, packed=packed).train()
    recompute_activations(policy.model, recompute)
    routers, micro = Routers(policy.model), collate(sequences(), 0, packed=packed)
    with routers.recording() as logits:
        policy(micro)
    assert len(logits) == 2
    found = routers.balance_loss(logits, micro)
    found.backward()
    assert len(logits) == 2, "the backward pass computes layers again and records nothing"
    plain = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    padded = collate(sequences(), 0)
    outputs = plain.model(input_ids=padded.input_ids, attention_mask=padded.attention_mask, output_router_logits=True)
    layers = [load_balancing_loss_func((one,), EXPERTS, CHOSEN, padded.attention_mask) for one in outputs.router_logits]
    expected = torch.stack(layers).mean()
    torch.testing.assert_close(found, expected)
    expected.backward()
    own = {name.removeprefix("model."): weight.grad for name, weight in policy.named_parameters()}
    gates = [(name, weight.grad) for name, weight in plain.named_parameters() if name.endswith("gate.weight")]
    for name, slope in gates:
        assert slope.abs().max() > 1e-4
        torch.testing.assert_close(own[name], slope, atol=1e-6, rtol=1e-4)


@pytest.mark.core
def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(model_path=str(make_model(tmp_path))), torch.float32, 64)
    with pytest.raises(InvalidInput, match=r"router_aux_loss_coef: is above 0, and Qwen2ForCausalLM has no routers"):
        routers_of(policy.model, 0.1, shared=False)
    assert routers_of(policy.model, 0.0, shared=False) is None
    with pytest.raises(InvalidInput, match=r"router_aux_loss_coef: is above 0, and trainer.ulysses_sequence"):
        routers_of(policy.model, 0.1, shared=True)


@pytest.mark.core
def test_descending_it_balances_the_experts(tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(model_path=str(make_mixture(tmp_path))), torch.float32, 64)
    routers, micro, losses = Routers(policy.model), collate(sequences(), 0), []
    optimizer = torch.optim.SGD([weight for name, weight in policy.named_parameters() if "gate.weight" in name], lr=0.5)
    for _ in range(30):
        with routers.recording() as logits:
            policy(micro)
        losses.append(routers.balance_loss(logits, micro))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert CHOSEN * 0.99 < losses[-1] < losses[0] - 0.1  # the least is reached if all experts get equally many tokens


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_step_moves_the_routers_only_by_the_coefficient(tmp_path: Path) -> None:
    """All rewards are equal, so that no other term has a gradient."""
    mixture, moved, losses = make_mixture(tmp_path / "model"), [], []
    before = Qwen3MoeForCausalLM.from_pretrained(mixture, dtype=torch.float32).state_dict()
    for coefficient in (1.0, 1e-12):
        algorithm = {"router_aux_loss_coef": coefficient, "optimizer": {"lr": 1e-2, "weight_decay": 0.0}}
        folder = tmp_path / f"{coefficient}"
        found = run_ranks(folder, mixture, ranks=1, zero=2, rewards="equal", algorithm=algorithm)
        losses.append(found["metrics"][0]["router_aux_loss"])
        gates = [name for name in before if name.endswith("gate.weight")]
        moved.append(max(float(np.abs(found[name] - before[name].numpy()).max()) for name in gates))
    assert losses[0] == losses[1] > CHOSEN
    assert moved[0] > 5e-3
    assert moved[1] < 1e-4
