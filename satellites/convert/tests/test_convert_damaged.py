"""`trinity convert` of damaged and hostile checkpoints: each is named, nothing in it is run, and the rest is done."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from support.fakes.evil import Evil
from support.fakes.models.convertible import assert_same_model, converted, plain_state, plain_step, shaken, step_folder
from support.programs.trainer.training import make_model
from trinity.runtime.process import time_limit

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shaken(make_model(tmp_path_factory.mktemp("model") / "base"))


def test_the_damaged_are_named_and_the_rest_is_done(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = plain_step(tmp_path, 1, model) / "model_world_size_1_rank_0.pt"
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    lost = plain_step(tmp_path, 2, model) / "model_world_size_1_rank_0.pt"
    lost.rename(lost.with_name("model_world_size_2_rank_1.pt"))
    noise = plain_step(tmp_path, 3, model) / "model_world_size_1_rank_0.pt"
    noise.write_bytes(np.random.default_rng(0).bytes(1000))
    other = plain_step(tmp_path, 4, model) / "model_world_size_1_rank_0.pt"
    torch.save([torch.zeros(1)], other)
    deepspeed = step_folder(tmp_path, 5, model) / "deepspeed"
    deepspeed.mkdir()
    module = {"model.a": torch.zeros(4)}
    states = {"module": module, "param_shapes": [{"model.a": torch.Size([4])}], "shared_params": {}, "dp_world_size": 2}
    torch.save(states, deepspeed / "mp_rank_00_model_states.pt")
    plain_step(tmp_path, 6, model)
    (tmp_path / "global_step_8").mkdir()
    step_folder(tmp_path, 9, model)

    assert converted(tmp_path, None, None) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if ": failed: " in line]
    named = [half, lost.with_name("model_world_size_2_rank_0.pt"), noise, other]
    named += [deepspeed / "zero_pp_rank_0_mp_rank_00_optim_states.pt", tmp_path / "global_step_8"]
    named += [tmp_path / "global_step_9/actor"]
    assert len(failed) == len(named)
    for line, path in zip(failed, named, strict=True):
        assert str(path) in line
    assert lines[-1] == "1 converted, 0 skipped, 7 failed"
    assert_same_model(tmp_path / "global_step_6/actor/huggingface", plain_state(model))
    assert not list(tmp_path.glob("global_step_[1-5]/actor/huggingface/*.safetensors"))


def test_a_name_that_says_a_billion_ranks_is_refused_at_once(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = plain_step(tmp_path, 1, model) / "model_world_size_1_rank_0.pt"
    only.rename(only.with_name("model_world_size_1000000000_rank_0.pt"))
    with time_limit(10):
        assert converted(tmp_path, None, None) == 1
    assert "model_world_size_1000000000_rank_1.pt is missing" in capsys.readouterr().out


def test_what_a_checkpoint_says_cannot_command_the_terminal(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = plain_step(tmp_path, 1, model) / "model_world_size_1_rank_0.pt"
    torch.save({"\x1b[2J": 7}, file)
    assert converted(tmp_path, None, None) == 1
    assert "holds a int as \\x1b[2J, not a tensor" in capsys.readouterr().out


@pytest.mark.parametrize("zipped", [True, False])
def test_an_evil_pickle_is_refused(
    zipped: bool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "owned"
    path = plain_step(tmp_path, 1, model) / "model_world_size_1_rank_0.pt"
    state = {**plain_state(model), "x": Evil(marker)}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    zero = step_folder(tmp_path, 2, model) / "deepspeed"
    zero.mkdir()
    torch.save({"module": {}, "optimizer": Evil(marker)}, zero / "mp_rank_00_model_states.pt")
    assert converted(tmp_path, None, None) == 1
    said = capsys.readouterr().out
    assert not marker.exists()
    assert said.count("posix.system") == 2 and str(path) in said
    assert "0 converted, 0 skipped, 2 failed" in said
    pickle.loads(pickle.dumps(Evil(marker)))
    assert marker.exists()  # it is evil indeed
