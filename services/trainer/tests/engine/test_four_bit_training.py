"""Adapters on a base of four bits under DeepSpeed: steps equal those on its rounded values, and resume bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.programs.trainer.engine_actions import act
from support.programs.trainer.training import make_model
from trinity.config.checks.lora import in_four_bits
from trinity.weights.checkpoint_slices import SliceReader
from trinity.weights.four_bit import rounded_base

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]
pytest.importorskip("bitsandbytes")

KINDS = [(1, 0, "float32"), (1, 2, "float32"), (2, 1, "bfloat16"), (2, 2, "float32"), (2, 3, "float32")]
LORA = {"lora_rank": 3, "lora_alpha": 6}
ACTIONS: list[list[Any]] = [
    ["dump", "start"], ["train", 1], ["dump", "one"], ["save", "one"], ["whole", "whole one"],
    ["train", 2], ["dump", "two"], ["resume", "one"], ["dump", "one again"], ["train", 2], ["dump", "two again"],
]  # fmt: skip


def changes(**lora: Any) -> dict[str, Any]:
    return {
        "model": {"lora_configs": [{**LORA, **lora}]},
        "algorithm": {"kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.01}},
        "trainer": {"gradient_checkpointing": True, "shared_prompts": True},
    }


def rounded_model(model: Path, folder: Path, dtype: torch.dtype) -> Path:
    """The model with the values that four bits stand for, at full width."""
    folder.mkdir()
    base = rounded_base(load_file(model / "model.safetensors").items(), in_four_bits, dtype)
    save_file({name: tensor.float() for name, tensor in base}, folder / "model.safetensors", metadata={"format": "pt"})
    for file in model.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]} ranks, ZeRO-{kind[1]}, {kind[2]}")
def test_steps_are_those_on_the_rounded_values(kind: tuple[int, int, str], tmp_path: Path) -> None:
    ranks, zero, dtype = kind
    model = make_model(tmp_path / "model")
    same: dict[str, Any] = {"ranks": ranks, "zero": zero, "dtype": dtype}
    found, said = act(tmp_path / "four", model, ACTIONS, **same, changes=changes(load_in_4bit=True))
    wide = rounded_model(model, tmp_path / "wide", getattr(torch, dtype))
    expected, expects = act(tmp_path / "plain", wide, ACTIONS, **same, changes=changes())
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    for dump in ("start", "one", "two", "whole one"):
        assert found[dump].keys() == expected[dump].keys()
        for name, value in found[dump].items():
            np.testing.assert_allclose(value, expected[dump][name], atol=tolerance, err_msg=f"{dump}: {name}")
    for step in ("train 1", "train 2"):
        np.testing.assert_allclose(said[step]["kl_loss"], expects[step]["kl_loss"], atol=tolerance)
    assert any(not np.array_equal(value, found["two"][name]) for name, value in found["one"].items())
    for before, again in (("one", "one again"), ("two", "two again")):
        assert all(value.tobytes() == found[again][name].tobytes() for name, value in found[before].items())
    saved = SliceReader(tmp_path / "four/one/slices").index
    assert all("lora_" in name for name in saved.parameters), "a checkpoint holds adapters only"
    assert saved.parameters == SliceReader(tmp_path / "plain/one/slices").index.parameters
