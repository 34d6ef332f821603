"""A replay compares its final weights with those of the run's checkpoint."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trinity.trainer.replay import differences, notes

pytestmark = pytest.mark.core

WEIGHTS = {
    "a": torch.tensor([1.0, -2.5, math.nan]),
    "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "c": torch.tensor(0.0),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """WEIGHTS in two shards."""
    save_file({"a": WEIGHTS["a"], "c": WEIGHTS["c"]}, tmp_path / "model-00000.safetensors")
    save_file({"b": WEIGHTS["b"]}, tmp_path / "model-00001.safetensors")
    return tmp_path


def test_equal_bits_are_equal_also_where_they_are_no_number(folder: Path) -> None:
    assert differences(WEIGHTS.items(), folder) == {"tensors": 3, "different": {}}


def test_the_smallest_difference_is_found_with_its_size(folder: Path) -> None:
    changed = dict(WEIGHTS)
    changed["b"] = WEIGHTS["b"].clone()
    changed["b"][1, 2] = 5.03125
    changed["c"] = torch.tensor(-0.0)  # equal as a number, and not the same
    assert differences(changed.items(), folder)["different"] == {"b": 0.03125, "c": 0.0}


def test_missing_added_and_reshaped_tensors_are_differences(folder: Path) -> None:
    changed = {"a": WEIGHTS["a"].reshape(3, 1), "b": WEIGHTS["b"].float(), "d": torch.zeros(1)}
    found = differences(changed.items(), folder)
    assert found == {"tensors": 3, "different": dict.fromkeys("abdc")}


def test_the_schedule_is_the_one_of_the_last_time_a_step_was_trained(tmp_path: Path) -> None:
    assert notes(tmp_path) == {}
    lines = [{"step": 1, "last_step": 4}, {"step": 2, "last_step": 4}, {"step": 2, "last_step": 9}, {"step": 3}]
    (tmp_path / "monitor").mkdir()
    lines += [{"step": [1], "last_step": 7}, {"step": 3, "last_step": "9", "rollback": None}]  # damaged
    text = "".join(json.dumps(note) + "\n" for note in lines) + '{"step": 4, "la'
    (tmp_path / "monitor/batches.jsonl").write_text(text)
    assert notes(tmp_path) == {1: {"last_step": 4}, 2: {"last_step": 9}, 3: {}}
