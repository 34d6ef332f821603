"""Defaults for activations on a GPU: tokens of a micro-batch, and which activations are recomputed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.fakes.models.sized_models import GIB, model_of, plan_of
from support.programs.trainer.engine_actions import act, run_module
from trinity.config import Plan
from trinity.trainer.model.activations import Activations, activation_bytes, choose
from trinity.trainer.process.ranks import Ranks

pytestmark = pytest.mark.core

ALONE = Ranks(rank=0, world_size=1, local_rank=0)


def chosen(
    plan: Plan, size: str = "0.5B", gib: float | None = 139, packed: bool = True, lean: bool = True
) -> Activations:
    memory = None if gib is None else int(gib * GIB)
    return choose(plan, model_of(size, packed, lean), ALONE, torch.device("cpu"), memory)


def tokens(plan: Plan, size: str = "0.5B", gib: float | None = 139, packed: bool = True) -> int:
    return chosen(plan, size, gib, packed).tokens


def test_a_large_gpu_gets_what_keeps_it_busy() -> None:
    assert tokens(plan_of(), "7B", 280) == 16_384
    assert tokens(plan_of(), "1.5B") == pytest.approx(17_000, rel=0.1)
    assert 40_000 < tokens(plan_of(), "0.5B") < 65_536


def test_what_the_yaml_says_is_what_is_done() -> None:
    assert tokens(plan_of({"max_token_len_per_gpu": 5000})) == 5000


def test_without_a_gpu_or_packing_it_is_twice_the_models_length() -> None:
    assert tokens(plan_of(), gib=None) == 4096
    assert tokens(plan_of(), packed=False) == 4096


def test_float32_takes_twice_the_room() -> None:
    """Weights and states are 16 bytes a parameter in both, but for the gradient's sum."""
    plan = {"gradient_checkpointing": False}
    wide = {**plan, "deepspeed": {"dtype": "float32"}}
    assert tokens(plan_of(wide), gib=32) < 0.6 * tokens(plan_of(plan), gib=32)


def test_a_long_model_has_its_two_sequences() -> None:
    assert tokens(plan_of(length=65_536), "7B", 280) == 131_072


def test_some_room_is_left_and_there_are_never_less_than_two_sequences() -> None:
    plan = plan_of({"gradient_checkpointing": False})
    found = {gib: tokens(plan, "0.5B", gib) for gib in (12, 24, 32, 48)}
    assert found[12] == 4096
    assert 4096 < found[24] < found[32] < found[48]
    model = model_of("0.5B")
    room = 32 * GIB - 18 * sum(parameter.numel() for parameter in model.parameters())
    shape = model.model.config.get_text_config()
    assert found[32] * activation_bytes(shape, False) < 0.9 * room
    whole = tokens(plan_of({"gradient_checkpointing": True}), "7B", 144)
    assert whole * activation_bytes(model_of("7B").model.config.get_text_config(), True) < 0.5 * 12 * GIB


@pytest.mark.parametrize(
    ("size", "gib", "recompute", "layers"),
    [("1.5B", 139, False, None), ("1.5B", 60, "mlp", 7), ("1.5B", 48, "mlp", 26), ("1.5B", 40, True, None),
     ("7B", 280, False, None), ("7B", 200, "mlp", 6), ("7B", 160, True, None)],
)  # fmt: skip
def test_only_what_memory_asks_for_is_recomputed(size: str, gib: float, recompute: Any, layers: int | None) -> None:
    expected = tokens(plan_of({"gradient_checkpointing": True}), size, 280)
    assert chosen(plan_of(), size, gib) == Activations(expected, recompute, layers)
    assert chosen(plan_of({"gradient_checkpointing": True}), size, gib).recompute is True
    assert chosen(plan_of({"gradient_checkpointing": False}), size, gib).recompute is False


def test_the_yaml_can_say_in_how_many_layers() -> None:
    asked = {"gradient_checkpointing": "mlp", "gradient_checkpointing_layers": 3}
    assert chosen(plan_of(asked), "1.5B") == Activations(16_384, "mlp", 3)
    assert chosen(plan_of(asked), gib=None) == Activations(4096, "mlp", 3)
    assert chosen(plan_of({"gradient_checkpointing_layers": 3}), "1.5B", 48).layers == 3
    assert chosen(plan_of({"gradient_checkpointing": "mlp"}), "1.5B", 60).layers is None


def test_without_a_gpu_all_is_recomputed() -> None:
    assert chosen(plan_of(), gib=None).recompute is True
    assert chosen(plan_of(), packed=False).recompute is True
    assert chosen(plan_of({"gradient_checkpointing": "mlp"}), gib=None).recompute == "mlp"


def test_by_rows_they_are_as_many_as_rows_can_have() -> None:
    few = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4}
    assert chosen(plan_of(few), "1.5B", 60).recompute is False
    assert chosen(plan_of({**few, "micro_batch_size_per_gpu": 16}), "1.5B", 60).recompute == "mlp"


def test_gpus_of_several_sizes_agree(tmp_path: Path) -> None:
    """Else one would wait for weights that the other does not gather again."""
    run_module("support.programs.trainer.unequal_ranks", tmp_path, 2, 60)
    alone, together = zip(*(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)), strict=True)
    assert alone[0][1] is False and alone[1][1] is True
    assert alone[1][0] < alone[0][0]
    assert together == (alone[1], alone[1])


def test_layers_that_keep_more_than_is_known_are_recomputed() -> None:
    plain = chosen(plan_of(), "1.5B", lean=False)
    assert plain == Activations(16_384, True)
    asked = plan_of({"gradient_checkpointing": False})
    assert tokens(asked, "0.5B", 32) > 1.7 * chosen(asked, "0.5B", 32, lean=False).tokens  # 0.9 of the room, and 0.5


def test_ranks_that_share_rows_have_a_part_of_each() -> None:
    plan = plan_of({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 16})
    model = model_of("1.5B")
    assert choose(plan, model, ALONE, torch.device("cpu"), 60 * GIB).recompute == "mlp"
    model.group = SimpleNamespace(size=4)
    assert choose(plan, model, ALONE, torch.device("cpu"), 60 * GIB).recompute is False


@pytest.mark.parametrize("asked", [None, "mlp", False], ids=str)
def test_the_engine_recomputes_what_was_chosen(quickstart_model: Path, tmp_path: Path, asked: Any) -> None:
    """Policy and critic; on a CPU all of a layer if the YAML does not say."""
    changes = {"trainer": {"gradient_checkpointing": asked}, "algorithm": {"algorithm_type": "ppo"}}
    _, found = act(tmp_path, quickstart_model, [["recomputed"]], ranks=1, zero=0, changes=changes)
    assert found["recomputed"] == [{None: ["layer", "mlp"], "mlp": ["mlp"], False: []}[asked]] * 2


def test_all_experts_that_a_token_meets_count() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    plain = activation_bytes(SimpleNamespace(**sizes), True)
    assert activation_bytes(SimpleNamespace(**sizes, num_experts_per_tok=8), True) == plain + 6 * 7 * 128
    qwen = SimpleNamespace(**sizes, num_experts_per_tok=8, moe_intermediate_size=32)
    assert activation_bytes(qwen, True) == plain + 6 * 128
    assert activation_bytes(SimpleNamespace(**{**sizes, "intermediate_size": [64, 128]}), True) == plain


def test_activations_of_each_kind_of_checkpointing() -> None:
    shape = model_of("1.5B").model.config.get_text_config()
    kept, mlp, recompute = (activation_bytes(shape, kind, lean=True) for kind in (False, "mlp", True))
    assert kept < activation_bytes(shape, False)
    assert kept > mlp > recompute
    # Seen on an H200, of 16,384 tokens: 49.4, 35.7 and 29.5 GiB, with 26 GiB of states and 1 GiB of logits.
    for estimate, seen in ((kept, 49.4), (mlp, 35.7), (recompute, 29.5)):
        assert estimate * 16_384 / GIB > seen - 27
    assert activation_bytes(SimpleNamespace(), False) == 0


def test_a_model_of_unknown_shape_has_two_sequences() -> None:
    model = model_of("0.5B")
    model.model.config.get_text_config = lambda: SimpleNamespace()
    assert choose(plan_of(), model, ALONE, torch.device("cpu"), 139 * GIB) == Activations(4096, True)
