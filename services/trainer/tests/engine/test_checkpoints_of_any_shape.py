"""A checkpoint is loaded by ranks of any number and ZeRO stage: float32 weights and moments bit for bit."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.programs.trainer.engine_actions import Dump, act
from support.programs.trainer.training import make_model, run_ranks
from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoint_slices import SliceReader

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

LORA = {"model": {"lora_configs": [{"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}]}}
PPO = {
    "algorithm": {"algorithm_type": "ppo"},
    "trainer": {"critic": {"optimizer": {"lr": 1e-2}, "warmup_steps": 0}},
}
# Ranks and ZeRO stage of one run after the other: each resumes from the checkpoint of the one before.
JOURNEYS = {
    "float32": [(1, 2), (4, 2), (2, 2), (2, 3), (2, 0), (2, 1), (3, 3)],
    "bfloat16": [(2, 3), (1, 0), (4, 1), (3, 0), (1, 2), (2, 3)],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def same_bits(one: Dump, other: Dump) -> None:
    assert one.keys() == other.keys() != set()
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name


def travel(
    folder: Path, model: Path, shapes: list[tuple[int, int]], *, dtype: str, changes: dict[str, Any] | None = None
) -> list[dict[str, Dump]]:
    """Trains two steps, and then only resumes and saves in each shape: what each of them has."""
    found = []
    for at, (ranks, zero) in enumerate(shapes):
        begin = [["train", 1], ["train", 2]] if at == 0 else [["resume", str(folder / f"saved{at - 1}/actor")]]
        seen = [["masters", "masters"], ["moments", "moments"], ["dump", "weights"]]
        actions = [*begin, *seen, ["save", str(folder / f"saved{at}/actor")]]
        dumps, _ = act(folder / str(at), model, actions, ranks=ranks, zero=zero, dtype=dtype, changes=changes)
        found.append(dumps)
    return found


@pytest.mark.parametrize("dtype", JOURNEYS)
def test_weights_and_moments_come_through_every_shape(dtype: str, model: Path, tmp_path: Path) -> None:
    found = travel(tmp_path, model, JOURNEYS[dtype], dtype=dtype)
    for one, other in pairwise(found):
        for kind in ("masters", "moments", "weights"):
            same_bits(one[kind], other[kind])
    assert found[0]["moments"]["counts"].tolist() == [2]
    assert any(value.any() for key, value in found[0]["moments"].items() if key.startswith("exp_avg_sq/"))


@pytest.mark.parametrize("changes", [LORA, PPO], ids=["lora", "critic"])
def test_adapters_and_a_critic_come_through_too(changes: dict[str, Any], model: Path, tmp_path: Path) -> None:
    shapes = [(1, 2), (3, 3), (2, 0)]
    found = travel(tmp_path, model, shapes, dtype="float32", changes=changes)
    for one, other in pairwise(found):
        same_bits(one["masters"], other["masters"])
        same_bits(one["moments"], other["moments"])
    if changes is PPO:
        states = [whole(tmp_path / f"saved{at}/critic/slices") for at in range(len(shapes))]
        assert all(state.keys() == states[0].keys() for state in states)
        assert any("exp_avg_sq/" in key and value.any() for key, value in states[0].items())
        assert all(torch.equal(value, state[key]) for state in states for key, value in states[0].items())


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of all ranks' files, by kind and parameter."""
    reader = SliceReader(folder)
    return {
        f"{kind}/{name}": torch.cat(reader.whole(kind, name, shape))
        for name, shape in reader.index.parameters.items()
        for kind in sorted(reader.kinds(name))
    }


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [((1, 2), (4, 3), {}), ((2, 3), (1, 0), {}), ((1, 0), (2, 1), PPO)],
)
def test_training_goes_on_as_if_nothing_had_changed(
    before: tuple[int, int], after: tuple[int, int], changes: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    steps = [["train", step] for step in (1, 2, 3, 4)]
    (ranks, zero), saved = before, str(tmp_path / "saved/actor")
    begun = [*steps[:2], ["save", saved], *steps[2:], ["dump", "end"]]
    whole_run, metrics = act(tmp_path / "a", model, begun, ranks=ranks, zero=zero, changes=changes)
    ranks, zero = after
    resumed = [["resume", saved], *steps[2:], ["dump", "end"]]
    other_run, others = act(tmp_path / "b", model, resumed, ranks=ranks, zero=zero, changes=changes)
    for name, value in whole_run["end"].items():
        np.testing.assert_allclose(other_run["end"][name], value, atol=1e-5, err_msg=name)
    for step in ("train 3", "train 4"):
        for name, number in metrics[step].items():
            assert others[step][name] == pytest.approx(number, rel=2e-5, abs=1e-6), (step, name)


@pytest.mark.parametrize(("ranks", "zero"), [(1, 0), (2, 3)])
def test_checkpoints_of_former_versions_are_loaded_by_their_ranks_and_stage(
    ranks: int, zero: int, model: Path, tmp_path: Path
) -> None:
    begun: list[list[Any]] = [["train", 1], ["train", 2], ["save as before", str(tmp_path / "old/actor")]]
    seen: list[list[Any]] = [["masters", "masters"], ["moments", "moments"]]
    one, _ = act(tmp_path / "a", model, [*begun, *seen], ranks=ranks, zero=zero)
    assert list((tmp_path / "old/actor/deepspeed").iterdir())
    resumed = [["resume", str(tmp_path / "old/actor")], *seen, ["save", str(tmp_path / "new/actor")]]
    two, _ = act(tmp_path / "b", model, resumed, ranks=ranks, zero=zero)
    three, _ = act(
        tmp_path / "c", model, [["resume", str(tmp_path / "new/actor")], *seen], ranks=3 - ranks, zero=3 - zero
    )
    for other in (two, three):
        same_bits(one["masters"], other["masters"])
        same_bits(one["moments"], other["moments"])


def test_what_is_missing_or_of_another_model_is_named(model: Path, tmp_path: Path) -> None:
    run_ranks(tmp_path / "run", model, ranks=2, zero=2, steps=1, save_at=1)
    saved = tmp_path / "run/saved/slices"
    lost = tmp_path / "lost"
    shutil.copytree(saved, lost)
    (lost / "rank_00001_00000.safetensors").unlink()
    reader = SliceReader(lost)
    with pytest.raises(InvalidInput, match=r"lost: has no elements \d+ to \d+ of the master of .*a rank's files"):
        for name, shape in reader.index.parameters.items():
            reader.whole("master", name, shape)
    (lost / "rank_00001.json").unlink()
    with pytest.raises(InvalidInput, match=r"rank_00001.json: is missing"):
        SliceReader(lost)
    half = saved / "rank_00000_00000.safetensors"
    half.write_bytes(half.read_bytes()[:-7])
    with pytest.raises(InvalidInput, match=r"rank_00000_00000.safetensors: is no whole safetensors file"):
        SliceReader(saved)
    index = saved / "slices.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "ranks": "2"}))
    with pytest.raises(InvalidInput, match=r"slices.json: is no index of slices"):
        SliceReader(saved)
