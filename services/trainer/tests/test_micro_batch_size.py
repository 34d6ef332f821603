"""Tokens of a micro-batch that the YAML does not say: large enough for a GPU, small enough for its memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.training import BASE
from trinity.config import Plan, make_plan
from trinity.config.schema import Config
from trinity.trainer.micro_batch_size import activation_bytes, micro_batch_tokens
from trinity.trainer.ranks import Ranks

GIB = 2**30
ALONE = Ranks(rank=0, world_size=1, local_rank=0)
QWEN = {  # hidden, layers, intermediate, vocabulary, of Qwen2.5
    "0.5B": (896, 24, 4864, 151_936),
    "1.5B": (1536, 28, 8960, 151_936),
    "7B": (3584, 28, 18944, 152_064),
}


def plan_of(trainer: dict[str, Any] | None = None, length: int = 2048) -> Plan:
    values = {**BASE, "model": {"model_path": "/models/x", "max_model_len": length, "max_prompt_tokens": 1}}
    return make_plan(Config.model_validate({**values, "trainer": trainer or {}}))


def model_of(size: str, packed: bool = True) -> Any:
    hidden, layers, inner, vocabulary = QWEN[size]
    shape = SimpleNamespace(hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner)
    count = layers * (3 * hidden * inner + 3 * hidden * hidden) + vocabulary * hidden
    weights = [torch.nn.Parameter(torch.empty(count, device="meta"))]
    config = SimpleNamespace(get_text_config=lambda: shape)
    return SimpleNamespace(packed=packed, parameters=lambda: weights, model=SimpleNamespace(config=config))


def tokens(plan: Plan, size: str = "0.5B", gib: float | None = 139, packed: bool = True) -> int:
    memory = None if gib is None else int(gib * GIB)
    return micro_batch_tokens(plan, model_of(size, packed), ALONE, memory)


def test_a_large_gpu_gets_what_keeps_it_busy() -> None:
    assert tokens(plan_of(), "7B", 280) == 16_384
    assert tokens(plan_of(), "1.5B") == pytest.approx(17_000, rel=0.1)
    assert 40_000 < tokens(plan_of(), "0.5B") < 65_536


def test_what_the_yaml_says_is_what_is_done() -> None:
    assert tokens(plan_of({"max_token_len_per_gpu": 5000})) == 5000


def test_without_a_gpu_or_packing_it_is_twice_the_models_length() -> None:
    assert tokens(plan_of(), gib=None) == 4096
    assert tokens(plan_of(), packed=False) == 4096


def test_where_rows_decide_nothing_is_chosen() -> None:
    assert tokens(plan_of({"use_dynamic_bsz": False})) == 4096


def test_float32_takes_twice_the_room() -> None:
    """Weights and states are 16 bytes a parameter in both, but for the gradient's sum."""
    plan = {"gradient_checkpointing": False}
    wide = {**plan, "deepspeed": {"dtype": "float32"}}
    assert tokens(plan_of(wide), gib=32) < 0.6 * tokens(plan_of(plan), gib=32)


def test_a_long_model_has_its_two_sequences() -> None:
    assert tokens(plan_of(length=65_536), "7B", 280) == 131_072


def test_half_of_the_room_is_left_and_never_less_than_two_sequences() -> None:
    plan = plan_of({"gradient_checkpointing": False})
    found = {gib: tokens(plan, "0.5B", gib) for gib in (12, 24, 32, 48)}
    assert found[12] == 4096
    assert 4096 < found[24] < found[32] < found[48]
    model = model_of("0.5B")
    room = 32 * GIB - 18 * sum(parameter.numel() for parameter in model.parameters())
    assert found[32] * activation_bytes(model.model.config.get_text_config(), False) < room / 2


def test_activations_of_each_kind_of_checkpointing() -> None:
    shape = model_of("1.5B").model.config.get_text_config()
    kept, mlp, anew = (activation_bytes(shape, kind) for kind in (False, "mlp", True))
    assert kept > mlp > anew
    # Seen on an H200, of 16,384 tokens: 49.4, 35.7 and 29.5 GiB, with 26 GiB of states and 1 GiB of logits.
    for estimate, seen in ((kept, 49.4), (mlp, 35.7), (anew, 29.5)):
        assert estimate * 16_384 / GIB > seen - 27
    assert activation_bytes(SimpleNamespace(), False) == 0


def test_a_model_of_unknown_shape_has_two_sequences() -> None:
    model = model_of("0.5B")
    model.model.config.get_text_config = lambda: SimpleNamespace()
    assert micro_batch_tokens(plan_of(), model, ALONE, 139 * GIB) == 4096
