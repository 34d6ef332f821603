"""Checkpoints become folders that transformers loads: the same logits, no code of the checkpoint run, nothing half."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.fakes.models.convertible import (
    assert_same_model,
    converted,
    plain_state,
    plain_step,
    shaken,
    step_folder,
)
from support.programs.trainer.engine_actions import run_module
from support.programs.trainer.training import make_model, run_ranks
from trinity.convert import write
from trinity.convert.source import Parameter
from trinity.weights.checkpoints import has_weights

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shaken(make_model(tmp_path_factory.mktemp("model") / "base", tied=request.param == "tied"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shaken(make_model(tmp_path_factory.mktemp("model") / "base"))


def fsdp_step(job: Path, step: int, model: Path, shape: str = "2", dim: int = 0) -> Path:
    actor = step_folder(job, step, model)
    (job / "fsdp.json").write_text(json.dumps({"model": str(model), "actor": str(actor), "mesh": shape, "dim": dim}))
    ranks = int(np.prod([int(size) for size in shape.split("x")]))
    run_module("support.programs.trainer.fsdp", job / "fsdp.json", ranks, 120)
    return actor


def tensors_of(actor: Path) -> dict[str, torch.Tensor]:
    return load_file(actor / "huggingface/model.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("zero", "any_model"),
    [(0, "tied"), (1, "untied"), (2, "untied"), (3, "tied"), (3, "untied")],
    indirect=["any_model"],
)
def test_what_the_engine_saved_on_two_ranks(zero: int, any_model: Path, tmp_path: Path) -> None:
    """As slices, and in the form of former versions."""
    trained = run_ranks(tmp_path / "run", any_model, ranks=2, zero=zero, steps=1, save_at=1, as_before=True)
    trained.pop("metrics")
    for step, form in ((1, "slices"), (2, "deepspeed")):
        (tmp_path / "run/saved" / form).rename(step_folder(tmp_path, step, any_model) / form)
    assert converted(tmp_path, None, None) == 0
    for step in (1, 2):
        actor = tmp_path / f"global_step_{step}/actor"
        found = tensors_of(actor)
        assert found.keys() == trained.keys()
        for name, value in trained.items():
            assert np.array_equal(found[name].numpy(), value), name
        assert_same_model(actor / "huggingface", {name: torch.tensor(value) for name, value in trained.items()})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("zero", "any_model"), [(0, "untied"), (3, "tied")], indirect=["any_model"])
def test_bfloat16_training_gives_its_float32_masters(zero: int, any_model: Path, tmp_path: Path) -> None:
    deepspeed = {"zero_stage": zero, "dtype": "bfloat16"}
    trainer = {"deepspeed": deepspeed}
    job = {"steps": 1, "save_at": 1, "die_after": 1, "as_before": True}
    run_ranks(tmp_path / "run", any_model, ranks=1, zero=zero, trainer=trainer, **job)
    (saved,) = (tmp_path / "run/saved/deepspeed").glob("*model_states.pt")
    module = torch.load(saved, weights_only=True)["module"]
    for step, dtype, form in ((1, "float32", "deepspeed"), (2, "bfloat16", "deepspeed"), (3, "float32", "slices")):
        actor = step_folder(tmp_path, step, any_model)
        shutil.copytree(tmp_path / "run/saved" / form, actor / form)
        config = actor / "huggingface/config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": dtype}))
    assert converted(tmp_path, None, None) == 0
    masters, rounded, sliced = (tensors_of(tmp_path / f"global_step_{step}/actor") for step in (1, 2, 3))
    assert sliced.keys() == masters.keys()
    assert all(torch.equal(tensor, masters[name]) for name, tensor in sliced.items())
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in masters.values())
    for name, tensor in rounded.items():
        assert torch.equal(tensor, masters[name].bfloat16()), name
        if zero != 3:  # there `module` is empty
            assert torch.equal(tensor, module[f"model.{name}"]), name


def test_paddings_groups_frozen_parameters_and_buffers_of_zero2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c, d = torch.randn(5), torch.randn(2, 2), torch.randn(3), torch.arange(3.0)
    vectors = [torch.cat([a, torch.zeros(3), b.flatten()]), torch.cat([c, torch.zeros(1)])]
    for step, vectors_there in ((1, vectors), (2, [torch.zeros(20), vectors[1]])):
        actor = step_folder(tmp_path, step, None)
        (actor / "huggingface").mkdir()
        (actor / "huggingface/config.json").write_text("{}")
        folder = actor / "deepspeed"
        folder.mkdir()
        module = {"model.a": a, "model.b": b, "model.c": c, "model.d": d, "model.seen": torch.tensor(7)}
        shapes = [{"model.a": a.shape, "model.b": b.shape}, {"model.c": c.shape}]
        states = {"module": module, "param_shapes": shapes, "shared_params": {}, "buffer_names": ["model.seen"]}
        states |= {"dp_world_size": 2, "frozen_param_shapes": {"model.d": d.shape}}
        torch.save(states | {"frozen_param_fragments": {"model.d": d}}, folder / "mp_rank_00_model_states.pt")
        for rank in range(2):
            parts = [vector.chunk(2)[rank].clone() for vector in vectors_there]
            optimizer = {"zero_stage": 2, "single_partition_of_fp32_groups": parts}
            optimizer["param_alignment_paddings"] = [[3, 0], [0]]
            path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer}, path)
    assert converted(tmp_path, None, None) == 1
    assert "12 of 20 float32 elements" in capsys.readouterr().out
    assert not list(tmp_path.glob("global_step_2/actor/huggingface/*model*"))
    found = tensors_of(tmp_path / "global_step_1/actor")
    expected = {"a": a, "b": b, "c": c, "d": d, "seen": torch.tensor(7)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("any_model", ["tied", "untied"], indirect=True)
def test_fsdp_shards_of_two_ranks(any_model: Path, tmp_path: Path) -> None:
    actor = fsdp_step(tmp_path, 7, any_model)
    assert converted(actor, None, None) == 0
    assert_same_model(actor / "huggingface", plain_state(any_model))
    assert tensors_of(actor).keys() == load_file(any_model / "model.safetensors").keys()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dim"), [("2x2", 0), ("2", 1)])
def test_fsdp_on_other_meshes(shape: str, dim: int, model: Path, tmp_path: Path) -> None:
    actor = fsdp_step(tmp_path, 7, model, shape, dim)
    assert converted(tmp_path, None, None) == 0
    for name, value in load_file(model / "model.safetensors").items():
        assert torch.equal(tensors_of(actor)[name], value), name


def test_a_second_call_skips(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    actor = plain_step(tmp_path / "project/run", 3, model)
    assert converted(tmp_path, None, None) == 0
    assert "project/run/global_step_3" in capsys.readouterr().out
    written = (actor / "huggingface/model.safetensors").stat()
    assert converted(tmp_path, None, None) == 0
    assert capsys.readouterr().out.endswith("0 converted, 1 skipped, 0 failed\n")
    assert (actor / "huggingface/model.safetensors").stat().st_mtime_ns == written.st_mtime_ns
    with (actor / "huggingface/model.safetensors").open("r+b") as file:
        file.truncate(written.st_size - 1)
    assert converted(tmp_path, None, None) == 0
    assert_same_model(actor / "huggingface", plain_state(model))


def test_old_files_of_torch_are_read(model: Path, tmp_path: Path) -> None:
    actor = step_folder(tmp_path, 1, model)
    torch.save(plain_state(model), actor / "model_world_size_1_rank_0.pt", _use_new_zipfile_serialization=False)
    assert converted(tmp_path, None, None) == 0
    assert_same_model(actor / "huggingface", plain_state(model))


def test_steps_restrict(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (100, 200, 300):
        plain_step(tmp_path, step, model)
    plain_step(tmp_path, 400, model).parent.rename(tmp_path / ".global_step_400.partial")
    for steps, reason in (
        ("100,x", "'x'"),
        ("", "''"),
        ("-1", "'-1'"),
        ("100,250,400", "step 250, 400; it has 100, 2"),
    ):
        assert converted(tmp_path, None, steps) == 2
        assert reason in capsys.readouterr().err
    assert converted(tmp_path, None, "300, 100") == 0
    assert "2 converted" in capsys.readouterr().out
    done = {path.parts[-4] for path in tmp_path.rglob("model.safetensors")}
    assert done == {"global_step_100", "global_step_300"}


@pytest.mark.parametrize("inside", ["", "actor", "actor/huggingface", "actor/model_world_size_1_rank_0.pt"])
def test_any_path_inside_a_step_is_the_step(inside: str, model: Path, tmp_path: Path) -> None:
    plain_step(tmp_path, 1, model)
    plain_step(tmp_path, 120, model)
    assert converted(tmp_path / "global_step_120" / inside, None, None) == 0
    assert [path.parts[-4] for path in tmp_path.rglob("model.safetensors")] == ["global_step_120"]


def test_nothing_there_is_said(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial = plain_step(tmp_path, 4, model).parent.rename(tmp_path / ".global_step_4.partial")
    for path in (tmp_path, partial, partial / "actor", tmp_path / "none"):
        assert converted(path, None, None) == 2
        assert str(path) in capsys.readouterr().err


def test_a_missing_config_comes_from_the_base_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actor = plain_step(tmp_path, 1, model, config=False)
    plain_step(tmp_path, 2, model)
    assert converted(tmp_path, None, None) == 1
    said = capsys.readouterr().out
    assert "--base-model-dir" in said and "1 converted, 0 skipped, 1 failed" in said
    assert converted(tmp_path, tmp_path, None) == 2
    assert converted(tmp_path, model, None) == 0
    names = {path.name for path in (actor / "huggingface").iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors"}
    assert_same_model(actor / "huggingface", plain_state(model))
    assert {path.name for path in tmp_path.glob("global_step_2/actor/huggingface/*")} == {
        "config.json",
        "model.safetensors",
    }


@pytest.mark.parametrize("said", [True, False, None])
def test_a_shared_head_is_written_once_unless_the_config_unties_it(
    said: bool | None, model: Path, tmp_path: Path
) -> None:
    actor = step_folder(tmp_path, 1, None)
    (actor / "huggingface").mkdir()
    config = {} if said is None else {"tie_word_embeddings": said}
    (actor / "huggingface/config.json").write_text(json.dumps(config))
    weight = torch.randn(6, 4)
    torch.save({"model.embed_tokens.weight": weight, "lm_head.weight": weight}, actor / "model_world_size_1_rank_0.pt")
    assert converted(tmp_path, None, None) == 0
    found = tensors_of(actor)
    assert set(found) == {"model.embed_tokens.weight"} | ({"lm_head.weight"} if said is False else set())
    assert all(torch.equal(tensor, weight) for tensor in found.values())


def test_float32_training_is_written_as_float32(tmp_path: Path) -> None:
    for step, folder in ((1, "deepspeed"), (2, None)):
        actor = step_folder(tmp_path, step, None)
        (actor / "huggingface").mkdir()
        (actor / "huggingface/config.json").write_text('{"torch_dtype": "bfloat16"}')
        state = {"model.a": torch.randn(3), "model.count": torch.tensor(3)}
        if folder:
            (actor / folder).mkdir()
            torch.save({"module": state, "param_shapes": None}, actor / folder / "mp_rank_00_model_states.pt")
        else:
            torch.save(state, actor / "model_world_size_1_rank_0.pt")
    assert converted(tmp_path, None, None) == 0
    ours, fsdp = (tensors_of(tmp_path / f"global_step_{step}/actor") for step in (1, 2))
    assert (ours["a"].dtype, ours["count"].dtype) == (torch.float32, torch.int64)
    assert (fsdp["model.a"].dtype, fsdp["model.count"].dtype) == (torch.bfloat16, torch.int64)


def test_shards_with_an_index(model: Path, tmp_path: Path) -> None:
    (tmp_path / ".converting-killed").mkdir()
    (tmp_path / ".converting-killed/0").touch()
    shutil.copy(model / "config.json", tmp_path)
    written = write.write_weights(tmp_path, parameters(model), shard_bytes=20_000)
    assert written.files > 3
    names = {path.name for path in tmp_path.iterdir()} - {"config.json", "model.safetensors.index.json"}
    assert names == {f"model-{n + 1:05d}-of-{written.files:05d}.safetensors" for n in range(written.files)}
    assert has_weights(tmp_path)
    assert_same_model(tmp_path, plain_state(model))
    (tmp_path / min(names)).unlink()
    assert not has_weights(tmp_path)


def test_what_fails_midway_leaves_nothing(model: Path, tmp_path: Path) -> None:
    def breaks() -> Iterator[Parameter]:
        yield from list(parameters(model))[:20]
        raise OSError("the disk went away")

    with pytest.raises(OSError, match="went away"):
        write.write_weights(tmp_path, breaks(), shard_bytes=20_000)
    assert not list(tmp_path.iterdir())


def parameters(model: Path) -> Iterator[Parameter]:
    for name, tensor in plain_state(model).items():
        yield Parameter(name, tuple(tensor.shape), tensor.dtype, (tensor,))


def test_the_command_starts_without_torch() -> None:
    code = "import sys, trinity.convert; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_base_model_of_other_shapes_is_refused_and_leaves_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actor = plain_step(tmp_path / "job", 1, model, config=False)
    before = {*actor.rglob("*")}
    other = shutil.copytree(model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = next(key for key in weights if key.endswith("embed_tokens.weight"))
    save_file({**weights, name: weights[name][:-1].contiguous()}, other / "model.safetensors")
    assert converted(tmp_path / "job", other, None) == 1
    said = capsys.readouterr().out
    assert "is another model" in said and name in said
    assert {path for path in actor.rglob("*") if path.is_file()} <= before
    assert converted(tmp_path / "job", model, None) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 5}, "num_hidden_layers is 5, the checkpoint has"),
        ({"hidden_size": 8}, "hidden_size is 8, the checkpoint has"),
        ({"vocab_size": 7}, "vocab_size is 7, the checkpoint has"),
    ],
)
@pytest.mark.parametrize("with_weights", [True, False])
def test_a_base_model_whose_config_is_of_another_model_is_refused(
    changes: dict[str, int],
    said: str,
    with_weights: bool,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A base with more layers has all tensors of the checkpoint, and one without weights has none to compare."""
    actor = plain_step(tmp_path / "job", 1, model, config=False)
    before = {*actor.rglob("*")}
    other = shutil.copytree(model, tmp_path / "other")
    if not with_weights:
        (other / "model.safetensors").unlink()
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **changes}))
    assert converted(tmp_path / "job", other, None) == 1
    text = capsys.readouterr().out
    assert f"--base-model-dir: {other} is another model: its {said}" in text, text
    assert {path for path in actor.rglob("*") if path.is_file()} <= before
    assert converted(tmp_path / "job", model, None) == 0
