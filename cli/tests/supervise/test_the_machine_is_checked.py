"""What this machine cannot take of a run is said by `check --deep`, and ends `run` before anything of it starts."""

import importlib.util
import json
import re
import socket
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from trinity.cli.main import app
from trinity.cli.supervise.checks import disk, preflight
from trinity.cli.supervise.checks.preflight import machine_problems
from trinity.cli.supervise.checks.task_environments import missing_packages
from trinity.config import load, make_plan
from trinity.environments.extras import needs
from trinity.plugins.environments import built_in_environments
from trinity.runtime import leases
from trinity.runtime.devices import TorchBuild
from trinity.weights.checkpoints import encode_header

pytestmark = pytest.mark.core

HUB_PROBLEM = preflight.hub_problem  # conftest.py replaces it in tests


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run whose model has 7 billion parameters by its files, which take no room."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    head = encode_header([("a", "BF16", [7 * 10**9], 14 * 10**9)])
    with (tmp_path / "model/model.safetensors").open("wb") as weights:
        weights.write(head)
        weights.truncate(len(head) + 14 * 10**9)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 4)
    columns = {"prompt_key": "question", "response_key": "answer"}
    taskset = {"name": "rows", "path": str(tmp_path / "rows.jsonl"), "format": columns}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({
        "name": "big",
        "checkpoint_root_dir": str(tmp_path / "jobs"),
        "model": {"model_path": str(tmp_path / "model"), "max_model_len": 64},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "buffer": {"batch_size": 2, "explorer_input": {"taskset": taskset}},
    }))  # fmt: skip
    return file


def seen(monkeypatch: pytest.MonkeyPatch, folder: Path, gib: int, count: int) -> None:
    """A machine with `count` GPUs, and a torch that can use them."""
    lines = "".join(
        f"{index}, GPU-{index}, NVIDIA Some, {gib * 1024}, {gib * 1024}, 580.65\\n" for index in range(count)
    )
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(disk, "free_gib", lambda folder: 10_000.0)
    monkeypatch.setattr(preflight, "torch_build", lambda: TorchBuild("2.11.0+cu130", "13.0"))


def test_check_says_what_does_not_fit_and_what_would(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(monkeypatch, tmp_path, 80, 2)
    done = CliRunner().invoke(app, ["check", "--deep", str(config)])
    assert done.exit_code == 2, done.stderr
    assert (
        "big: not on this machine: trainer.deepspeed.zero_stage: is 2: weights and training states of 7.00 billion"
        in (done.stdout)
    )


@pytest.mark.parametrize(
    ("given", "passes"),
    [
        ({}, False),
        ({"NETRC": "netrc"}, True),
        ({"NETRC": "netrc", "WANDB_BASE_URL": "https://wandb.example.com"}, False),
        ({"WANDB_API_KEY": "k" * 40}, True),
        ({"WANDB_MODE": "offline"}, True),
        ({"WANDB_MODE": "online"}, False),
    ],
)
def test_wandb_needs_a_key(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], passes: bool
) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {'k' * 40}\n")
    (tmp_path / "netrc").chmod(0o600)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name, value in given.items():
        monkeypatch.setenv(name, str(tmp_path / value) if name == "NETRC" else value)
    problems = preflight._check_monitor(make_plan(load(config, ["monitor.monitor_type=wandb"])))
    assert [str(one) for one in problems] == (
        []
        if passes
        else ["monitor.monitor_type: is 'wandb', which has no key; set WANDB_API_KEY, run 'wandb login', or set "
              "WANDB_MODE=offline"]
    )  # fmt: skip
    own = make_plan(load(config, ["monitor={monitor_type: wandb, monitor_args: {api_key: mine}}"]))
    assert preflight._check_monitor(own) == []


def test_json_leaves_nothing_unchecked(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, tmp_path, 80, 2)
    done = CliRunner().invoke(app, ["check", "--deep", "--json", str(config)])
    assert done.exit_code == 2, done.stderr
    assert json.loads(done.stdout)["name"] == "big"
    assert "big: not on this machine: trainer.deepspeed.zero_stage" in done.stderr
    done = CliRunner().invoke(app, ["check", "--deep", "--json", str(config), "model.model_path=/none"])
    assert done.exit_code == 2 and "model.model_path: '/none' does not exist" in done.stderr
    assert CliRunner().invoke(app, ["check", "--json", str(config)]).exit_code == 0


def test_what_fits_is_not_spoken_of(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, tmp_path, 140, 2)
    assert machine_problems(make_plan(load(config))) == []
    done = CliRunner().invoke(app, ["check", "--deep", str(config)])
    assert done.exit_code == 0, done.stderr
    assert "not on this machine" not in done.stdout


@pytest.mark.timeout(120)
def test_run_ends_before_a_process_of_the_stage_starts(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(monkeypatch, tmp_path, 80, 1)
    done = CliRunner().invoke(app, ["run", "--config", str(config)])
    assert done.exit_code == 2
    assert "engine and trainer share GPU 0 (NVIDIA Some, 80.0 GiB): the engine needs at least 17.0 GiB" in done.stderr
    assert not list((tmp_path / "jobs").rglob("explorer*.log")) + list((tmp_path / "jobs").rglob("trainer*.log"))


def test_images_need_the_operators_word_and_docker(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(monkeypatch, tmp_path, 140, 2)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(leases.CONTAINERS_VARIABLE, raising=False)
    given = [str(config), "explorer.environments=[{name: guess, address: '127.0.0.1:1', image: my/guess:1}]"]
    for said in ("this machine allows no containers; set ", "docker is not on PATH; install it"):
        for command in (["check", "--deep"], ["run"]):
            done = CliRunner().invoke(app, [*command, *given])
            assert done.exit_code == 2
            assert f"{config}: explorer.environments.0.image: {said}" in done.stderr
        monkeypatch.setenv(leases.CONTAINERS_VARIABLE, "true")
    assert not list((tmp_path / "jobs").rglob("*.log"))
    done = CliRunner().invoke(app, ["check", "--deep", *given, "mode=serve"])
    assert done.exit_code == 0, f"it starts no environments: {done.stderr}"


def test_a_missing_engine_is_named_with_its_extra(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name, *rest))
    done = CliRunner().invoke(app, ["run", str(config)])
    assert done.exit_code == 2
    assert "mode: 'both' needs vLLM, which is not installed: `pip install -e '.[cpu]'`" in done.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "'alfworld' cannot be played here: alfworld is not installed; pip install -e '.[alfworld]'"),
        (["explorer.environments=[{name: alfworld, address: attached}]"], ""),
        (["mode=explore"], ""),
    ],
)
def test_a_run_whose_environment_is_not_installed_is_refused_before_anything_starts(
    changes: list[str], said: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = needs("no_such_module", "alfworld", "alfworld")(type("Hidden", (built_in_environments()["alfworld"],), {}))
    monkeypatch.setitem(built_in_environments(), "alfworld", hidden)
    taskset = "buffer.explorer_input.taskset"
    played = [f"{taskset}.default_workflow_type=alfworld_workflow", f"{taskset}.path={config.parent}/rows.jsonl"]
    (config.parent / "rows.jsonl").write_text('{"question": "", "answer": "", "game_file": "g"}\n' * 4)
    loaded = load(config, [*played, "model.max_model_len=4096", *changes])
    problems = [problem.message for problem in missing_packages(make_plan(loaded))]
    assert problems == ([said] if said else [])
    if said:
        done = CliRunner().invoke(app, ["run", "--config", str(config), *played, "model.max_model_len=4096"])
        assert done.exit_code == 2, done.output
        assert f"{taskset}.workflow_args.environment: {said}" in done.stderr
        assert not (config.parent / "jobs/Trinity-RFT/big/log").exists()


@pytest.mark.parametrize(("free_gib", "code"), [(10_000.0, 0), (200.0, 0), (30.0, 2)])
def test_a_disk_that_takes_no_checkpoint_is_refused_and_one_that_fills_is_warned_of(
    free_gib: float, code: int, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(monkeypatch, tmp_path, 140, 2)
    monkeypatch.setattr(disk, "free_gib", lambda folder: free_gib)
    changes = ["trainer.save_interval=5", "trainer.max_checkpoints_to_keep=2"]
    done = CliRunner().invoke(app, ["check", "--deep", str(config), *changes])
    assert done.exit_code == code, done.stderr
    wanted = {
        10_000.0: "",
        200.0: "warning: big: checkpoint_root_dir: the disk of ",
        30.0: "big: not on this machine: checkpoint_root_dir: the disk of ",
    }[free_gib]
    assert wanted in done.stdout and ("the disk of" in done.stdout) is bool(wanted)
    if code == 2:
        assert (
            "has 30.0 GiB free, and a checkpoint (91.3 GiB), two versions of the weights (13.0 GiB each) and the"
            in (done.stdout)
        )
        run = CliRunner().invoke(app, ["run", str(config)])
        assert run.exit_code == 2 and "checkpoint_root_dir: the disk of" in run.stderr


def test_a_hub_model_that_is_not_to_be_had_ends_check_and_run(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "hub_problem", HUB_PROBLEM)
    named = [str(config), "model.model_path=someone/no-such-model"]
    for command in (["check", "--deep"], ["run"]):
        done = CliRunner().invoke(app, [*command, *named])
        assert done.exit_code == 2 and "model.model_path: 'someone/no-such-model' is no folder" in done.output
        assert "model and data are there" not in done.output
    place = tmp_path / "hub/models--someone--no-such-model"
    (place / "snapshots/1").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs/main").write_text("1")
    (place / "snapshots/1/config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert preflight.check_model_folder("model.model_path", "someone/no-such-model")
    (place / "snapshots/1/model.safetensors.index.json").write_text("{}")
    assert preflight.check_model_folder("model.model_path", "someone/no-such-model") == []


def test_files_of_weights_that_are_not_whole_are_named(tmp_path: Path) -> None:
    def found() -> str:
        return "".join(problem.message for problem in preflight.check_model_folder("model.model_path", str(tmp_path)))

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    assert "a.safetensors: is no whole safetensors file: [Errno 2]" in found()
    (tmp_path / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert "a.safetensors: is no whole safetensors file: the header is longer than the file; download it" in found()
    save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    assert found() == ""
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-1])
    assert re.search("model.safetensors: is no whole safetensors file: [0-9]+ bytes instead of", found())


def test_adapters_in_place_of_a_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    [problem] = preflight.check_model_folder("model.model_path", str(tmp_path))
    assert "it is a folder of LoRA adapters; give their base model here" in problem.message


def test_the_port_of_the_environment_service_is_tried(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setenv("TRINITY_ENVIRONMENT_LISTEN", address)
        done = CliRunner().invoke(app, ["check", "--deep", str(config)])
    assert done.exit_code == 2 and f"another process listens on {address}" in done.output
