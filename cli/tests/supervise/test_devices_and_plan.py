"""Which GPU each process gets on this machine, what `check` says of a YAML, and how it refuses one."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from trinity.cli.commands.plan_text import describe
from trinity.cli.main import app
from trinity.cli.supervise.processes import devices, services
from trinity.cli.supervise.processes.devices import place
from trinity.config import Plan, load, make_plan
from trinity.config.load import parse
from trinity.config.run_record import Addresses
from trinity.reading import processes
from trinity.reading.errors import RunError
from trinity.reading.job import Job, ProcessRecord, SupervisorRecord
from trinity.reading.nats import NatsAccess
from trinity.runtime import files
from trinity.runtime.devices import Gpu

pytestmark = pytest.mark.core

BASE = """
model: {model_path: m, max_model_len: 64}
algorithm: {algorithm_type: grpo, repeat_times: 4}
buffer:
  batch_size: 8
  explorer_input: {taskset: {name: t, path: d.jsonl}, eval_tasksets: [{name: e, path: d.jsonl}]}
"""
JUDGES = "explorer.auxiliary_models=[{model_path: x/judge}, {model_path: y/scorer, tensor_parallel_size: 2}]"
EIGHT = list("01234567")


def plan_of(*overrides: str) -> Plan:
    return make_plan(parse(BASE, overrides=overrides))


def engines(number: int, parallel: int = 1) -> list[str]:
    rollout = "explorer.rollout_model"
    return [f"{rollout}.engine_num={number}", f"{rollout}.tensor_parallel_size={parallel}"]


def published(repository: Path, name: str) -> Path:
    return repository / "satellites/trinity_rft/tests/trinity_rft" / name


def trinity(*arguments: object, **environment: str) -> Result:
    """The command, in this process: nothing here starts another."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def test_a_machine_without_gpus_is_one_rank_on_the_cpu_or_as_many_as_are_asked_for() -> None:
    placed = place(plan_of(*engines(4, 2), JUDGES), [])
    assert (placed.device, placed.explorer, placed.trainer, placed.trainer_ranks) == ("cpu", [], [], 1)
    assert place(plan_of("trainer.num_ranks=3"), []).trainer_ranks == 3


@pytest.mark.parametrize(
    ("overrides", "taken", "explorer", "trainer"),
    [
        (engines(2), (), "01", "234567"),
        ([*engines(2), JUDGES], (), "01234", "567"),
        ([*engines(1, 2), "trainer.num_ranks=4"], (), "01", "2345"),
        ([*engines(2), "cluster.node_num=1", "cluster.gpu_per_node=4"], (), "01", "23"),
        ([*engines(2), JUDGES, "mode=train"], (), "", "01234567"),
        ([*engines(4), JUDGES, "mode=explore"], (), "0123456", ""),
        ([*engines(8), "mode=serve"], (), "01234567", ""),
        ([*engines(2), "mode=explore"], ("0", "1", "4"), "23", ""),
        ([*engines(2), "mode=explore"], ("6", "5", "4", "3", "2", "1"), "07", ""),
        ([*engines(2), "mode=bench"], ("9",), "01", ""),
    ],
)
def test_engines_and_auxiliary_models_come_first_and_no_gpu_is_given_twice(
    overrides: list[str], taken: tuple[str, ...], explorer: str, trainer: str
) -> None:
    placed = place(plan_of(*overrides), EIGHT, taken)
    assert (placed.device, placed.explorer, placed.trainer) == ("cuda", list(explorer), list(trainer))
    assert placed.trainer_ranks == (len(trainer) or 1)


@pytest.mark.parametrize(
    ("overrides", "gpus", "taken", "said"),
    [
        (engines(3), "01", "", "3 engine(s) of 1 GPU(s) do not fit on the 2 GPU(s) free here"),
        ([*engines(2), JUDGES], "0123", "",
         "2 engine(s) of 1 GPU(s) and auxiliary models on 3 do not fit on the 4 GPU(s) free here"),
        (engines(1), "MIG-1", "", "engine and trainer would share a GPU whose memory nvidia-smi does not report"),
        ([*engines(1, 4), "mode=explore"], "01234567", "01234",
         "1 engine(s) of 4 GPU(s) do not fit on the 3 GPU(s) free here"),
        ([*engines(1), "mode=serve"], "0", "0", "do not fit on the 0 GPU(s) free here"),
    ],
)  # fmt: skip
def test_engines_that_do_not_fit_are_refused_with_their_key(
    overrides: list[str], gpus: str, taken: str, said: str
) -> None:
    with pytest.raises(RunError) as refused:
        place(plan_of(*overrides), [gpus] if gpus.startswith("MIG") else list(gpus), list(taken))
    assert str(refused.value).startswith("explorer.rollout_model.engine_num: ")
    assert said in str(refused.value)


def test_a_trainer_shares_the_engines_gpus_where_they_need_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = "".join(f"{index}, GPU-{index}, NVIDIA Some, {80 * 1024}, {80 * 1024}, 580.65\\n" for index in range(2))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    model = "model.model_path=some/model-1.5B"
    placed = place(plan_of(*engines(2), model), ["0", "1"])
    assert (placed.explorer, placed.trainer, placed.trainer_ranks) == (["0", "1"], ["0", "1"], 2)
    assert placed.split is not None
    assert placed.split.engine + placed.split.trainer == pytest.approx(79)
    explorer = services.explorer(plan_of(model), tmp_path, NatsAccess(""), Addresses(), tmp_path, placed)
    trainer = services.trainer(tmp_path, Addresses(), tmp_path, placed)
    assert explorer.environment["TRINITY_EXPLORER_GPU_MEMORY_GIB"] == f"{placed.split.engine:.2f}"
    assert "collective" not in explorer.environment["TRINITY_EXPLORER_TRANSPORTS"]
    assert trainer.environment["TRINITY_TRAINER_GPU_MEMORY_GIB"] == f"{placed.split.trainer:.2f}"
    with pytest.raises(RunError, match=r"explorer.rollout_model.engine_num: engine and trainer share GPU 0 .*1345.1"):
        place(plan_of("model.model_path=some/model-72B"), ["0"])


def test_the_buffer_of_a_run_is_told_where_the_others_listen(tmp_path: Path) -> None:
    """It announces them; sync, environment and trainer say nothing of themselves."""
    children, addresses = services.infrastructure(plan_of(), tmp_path, NatsAccess("nats://h:1"), tmp_path, tmp_path)
    services.announce(children[0], replace(addresses, trainer="h:5"))
    told = {name: value for name, value in children[0].environment.items() if name.endswith("_ADDRESS")}
    assert told == {
        "TRINITY_BUFFER_ENVIRONMENT_ADDRESS": addresses.environment,
        "TRINITY_BUFFER_SYNC_ADDRESS": addresses.sync,
        "TRINITY_BUFFER_TRAINER_ADDRESS": "h:5",
    }
    assert told["TRINITY_BUFFER_SYNC_ADDRESS"] == children[2].address


def test_the_limit_of_the_log_is_the_given_one_or_fits_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, nats = plan_of(f"checkpoint_root_dir={tmp_path}"), NatsAccess("nats://127.0.0.1:1")
    monkeypatch.setattr(services.nats, "free_gib", lambda folder: 40.0)
    limits = []
    for given in ("", "7"):
        monkeypatch.setenv("TRINITY_BUFFER_LOG_GIB", given)
        children, _ = services.infrastructure(plan, tmp_path / "config.json", nats, tmp_path, tmp_path)
        limits.append(children[0].environment["TRINITY_BUFFER_LOG_GIB"])
    assert limits == ["4.00", "7"]


def test_ranks_that_do_not_fit_are_refused_with_their_key() -> None:
    with pytest.raises(RunError) as refused:
        place(plan_of(*engines(2), "trainer.num_ranks=3"), list("0123"))
    assert str(refused.value) == "trainer.num_ranks: is 3, but 2 of the 4 GPU(s) free here are left for the trainer"
    assert place(plan_of(*engines(2), "trainer.num_ranks=3", "mode=explore"), list("0123")).trainer == []


def rows_of(text: str) -> dict[str, str]:
    """What `describe` says, by the name of the row; several of one name are joined."""
    rows: dict[str, str] = {}
    for line in text.splitlines()[1:]:
        name, _, value = line.strip().partition("  ")
        rows[name] = f"{rows[name]}; {value.strip()}" if name in rows else value.strip()
    return rows


def test_the_published_ppo_run_is_described_with_its_gpus(repository: Path) -> None:
    text = describe(make_plan(load(published(repository, "ppo_example.yaml"))))
    rows = rows_of(text)
    assert text.startswith("verl_example/Qwen2-7B-Instruct_hybrid_rm\n")
    assert rows["cluster"].startswith("1 node(s) x 8 GPU(s)")
    assert rows["explorer"] == "2 engine(s) x 1 GPU(s) = 2 GPU(s)"
    assert rows["auxiliary"] == "FsfairX-LLaMA3-RM-v0.1: 2 engine(s) x 1 GPU(s)"
    assert rows["trainer"] == "4 GPU(s), ZeRO 2"
    assert rows["batch"] == "256 tasks x 1 rollouts = 256 experiences per optimizer step"
    assert rows["steps"] == "15 epoch(s) of the data"
    assert rows["staleness"].startswith("at most 4 step(s), 1280 groups outstanding (fixed: ")
    assert rows["tasksets"] == "gsm8k, math"
    assert rows["evaluation"] == "gsm8k_eval, math_eval every 5 steps"
    assert rows["checkpoints"] == "every 20 steps and at the end, all kept"
    assert rows["lengths"] == "1024 prompt + 512 response <= 1536 tokens"
    assert rows["memory"].startswith("7.00 billion parameters by its name: ")


def test_a_plan_shows_no_password(repository: Path) -> None:
    overrides = ["model.model_path=https://me:secret@hub.example.org/model"]
    rows = rows_of(describe(make_plan(load(published(repository, "ppo_example.yaml"), overrides=overrides))))
    assert rows["model"] == "https://***@hub.example.org/model"


def test_a_run_that_does_not_wait_for_its_slowest_tasks_says_for_how_many_it_does(repository: Path) -> None:
    overrides = ["explorer.over_rollout={ratio: 0.25, wait_after_min: 5}"]
    rows = rows_of(describe(make_plan(load(published(repository, "ppo_example.yaml"), overrides=overrides))))
    said = "256 experiences per optimizer step; 5 s after 192 groups are there the other tasks are cut"
    assert rows["batch"].endswith(said)


def test_the_two_halves_of_the_published_asynchronous_run_are_described(repository: Path) -> None:
    trainer = rows_of(describe(make_plan(load(published(repository, "async_trainer.yaml")))))
    assert trainer["staleness"].startswith("at most 9 step(s), 640 groups outstanding")
    assert trainer["trainer"] == "4 GPU(s), ZeRO 2"
    assert trainer["services"].startswith("nats, buffer, environment, sync")
    assert "explorer" not in trainer
    explorer = rows_of(describe(make_plan(load(published(repository, "async_explorer.yaml")))))
    assert explorer["mode"] == "explore"
    assert explorer["explorer"] == "4 engine(s) x 1 GPU(s) = 4 GPU(s)"
    assert not {"trainer", "services", "staleness", "checkpoints", "memory"} & set(explorer)


def test_a_dataset_alone_is_described_without_explorers(repository: Path, tmp_path: Path) -> None:
    stages = published(repository, "grpo_gsm8k.yaml").read_text() + published(
        repository, "stages_sft_then_rft.yaml"
    ).read_text()  # fmt: skip
    (tmp_path / "run.yaml").write_text(stages)
    done = trinity("check", tmp_path / "run.yaml")
    assert done.exit_code == 0, done.stderr
    first, second = done.stdout.split("\n" + done.stdout.partition("/")[0] + "/")
    assert "sft" in rows_of(first)["algorithm"]
    assert rows_of(first)["services"].startswith("nats, buffer:")
    assert "explorer" not in rows_of(first)
    assert "grpo" in rows_of(second)["algorithm"]
    assert "explorer" in rows_of(second)


def test_dry_run_and_check_say_the_same_wherever_the_yaml_stands(repository: Path) -> None:
    path = published(repository, "async_trainer.yaml")
    asked = [
        ("check", "--config", path, "buffer.total_steps=7"),
        ("check", path, "buffer.total_steps=7"),
        ("run", path, "--dry-run", "buffer.total_steps=7"),
        ("run", "--dry-run", "buffer.total_steps=7", "--config", path),
    ]
    first, *others = [trinity(*arguments) for arguments in asked]
    assert first.exit_code == 0
    assert rows_of(first.stdout)["steps"] == "7"
    for other in others:
        assert (other.exit_code, other.stdout, other.stderr) == (0, first.stdout, first.stderr)


def test_check_imports_nothing_heavy(repository: Path) -> None:
    code = (
        "import sys, trinity.cli.main as m\n"
        "try:\n    m.app()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'vllm', 'deepspeed', 'transformers', 'nats', 'pyarrow', 'numpy', 'datasets'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    path = published(repository, "ppo_example.yaml")
    for arguments in (["check", path], ["run", path, "--dry-run"], ["check", path, "--json"]):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["ppo_example.yaml", "async_trainer.yaml", "grpo_example.yaml"])
def test_json_has_no_interpolation_left_and_is_a_configuration_again(
    repository: Path, tmp_path: Path, name: str
) -> None:
    done = trinity(
        "check", published(repository, name), "--json", "buffer.total_steps=7", TRINITY_MODEL_PATH="my/model"
    )
    assert done.exit_code == 0, done.stderr
    values = json.loads(done.stdout)
    assert "${" not in done.stdout
    assert values["buffer"]["total_steps"] == 7
    if name == "async_trainer.yaml":
        assert values["model"]["model_path"] == "my/model"
    (tmp_path / "again.json").write_text(done.stdout)
    again = trinity("check", tmp_path / "again.json", "--json")
    assert (again.exit_code, again.stdout) == (0, done.stdout), again.stderr


def test_several_problems_are_reported_together_with_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(BASE.replace("batch_size", "batch_sise").replace("repeat_times: 4", "repeat_tims: 4"))
    for command in (["check", path], ["run", path, "--dry-run"], ["run", path]):
        done = trinity(*command)
        assert (done.exit_code, done.stdout) == (2, "")
        lines = done.stderr.splitlines()
        assert len(lines) == 2
        assert all(line.startswith(f"{path}: line ") for line in lines)
        assert "algorithm.repeat_tims: unknown key; did you mean 'repeat_times'?" in lines[0]
        assert "buffer.batch_sise: unknown key; did you mean 'batch_size'?" in lines[1]


def test_contradictions_are_reported_together_too(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    cluster = "cluster: {node_num: 1, gpu_per_node: 1}\nexplorer: {rollout_model: {engine_num: 2}}\n"
    path.write_text(f"{BASE}{cluster}monitor: {{monitor_args: {{a: 1}}}}\n")
    done = trinity("check", path, "buffer.train_batch_size=3")
    assert done.exit_code == 2
    for key in ("buffer.train_batch_size", "explorer.rollout_model.engine_num", "monitor.monitor_args.a"):
        assert f" {key}: " in done.stderr, key


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check"], "no YAML"),
        (["run", "buffer.batch_size=3"], "no YAML"),
        (["check", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["check", "--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
    ],
)
def test_a_missing_yaml_is_one_sentence(arguments: list[str], said: str) -> None:
    done = trinity(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_yaml_in_a_folder_with_an_equals_sign_is_a_yaml(tmp_path: Path) -> None:
    (tmp_path / "lr=1").mkdir()
    (tmp_path / "lr=1/run.yaml").write_text(BASE)
    assert trinity("check", tmp_path / "lr=1/run.yaml").exit_code == 0


def test_ppo_with_its_critic_is_accepted(repository: Path) -> None:
    path = published(repository, "ppo_example.yaml")
    assert trinity("check", path).exit_code == 0
    assert trinity("run", path, "--dry-run").exit_code == 0


def test_gpus_of_other_commands_are_taken_and_ones_own_are_not(tmp_path: Path) -> None:
    """A stage follows another one in the same process: what the earlier one held is free again."""
    config = parse(f"project: p\nname: n\ncheckpoint_root_dir: {tmp_path}\nmodel: {{model_path: m, max_model_len: 8}}\n"
                   "buffer: {explorer_input: {taskset: {path: d.jsonl}}}\n")  # fmt: skip
    job = Job(config)
    held = ProcessRecord("explorer", "explorer", 1, "", gpus=["0", "1"])
    job.write_record("main", SupervisorRecord(os.getpid(), "both", "r", "", "", [held]))
    assert job.taken_gpus() == set()
    other = ProcessRecord("explorer_new", "explorer", 2, "", gpus=["2"])
    job.write_record("explorer-new", SupervisorRecord(os.getppid(), "explore", "r", "", "", [other]))
    assert job.taken_gpus() == {"2"}
    path = job.folder / "run" / "explorer-new.json"
    files.write_json(path, files.read_json(path) | {"begun": 1})  # before the machine started again
    assert (job.taken_gpus(), set(job.records())) == (set(), {"main"}), "another process has the id of the killed one"


def test_gpus_that_another_run_uses_are_named_once_their_memory_stays_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def detect(environment: dict[str, str]) -> list[Gpu]:
        asked.append(environment["CUDA_VISIBLE_DEVICES"])
        used = 70.0 if len(asked) == 1 or environment["CUDA_VISIBLE_DEVICES"] == "3" else 0.5
        return [Gpu(index, "NVIDIA Some", 80.0, 80.0 - used, "580") for index in asked[-1].split(",")]

    monkeypatch.setattr(devices, "detect_gpus", detect)
    monkeypatch.setattr(devices, "_FREED_SECONDS", 0.2)
    assert devices.busy_gpus(devices.Placement("cuda", ["0"], ["0", "1"], 2)) == "", "the memory of ended processes"
    assert asked == ["0,1", "0,1"]
    said = devices.busy_gpus(devices.Placement("cuda", [], ["3"], 1))
    assert "other processes use this run's GPUs: 10.0 GiB are free of GPU 3 (NVIDIA Some, 80.0 GiB)" in said
    assert devices.busy_gpus(devices.Placement("cpu", [], [], 1)) == ""


@pytest.mark.parametrize("host", ["::1", "192.0.2.1"])
def test_a_wrong_trinity_host_is_named_before_a_service_starts(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "HOST", host)
    with pytest.raises(RunError, match=rf"TRINITY_HOST: no service can listen on '{host}' \(.*give an IPv4 address"):
        processes.service_child("buffer", tmp_path, {})


def test_other_braces_than_those_of_the_host_stay_in_the_name_of_an_explorer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_EXPLORER_NAME", "gpu/{hostname}/{host}")
    access = NatsAccess("nats://127.0.0.1:1", tmp_path)
    asked = []
    monkeypatch.setattr(NatsAccess, "settings", lambda self, role, run, name="": asked.append(name) or {})
    placement = devices.Placement("cpu", [], [], 1)
    services.explorer(plan_of(), tmp_path / "c.json", access, Addresses(), tmp_path, placement)
    assert asked == [f"gpu/{{hostname}}/{socket.gethostname()}"]
