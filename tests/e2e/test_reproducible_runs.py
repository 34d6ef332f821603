"""`reproducible: true`: asynchronous runs that are equal, bit for bit, with kills and with another number of explorers.

Real vLLM, DeepSpeed and JetStream. The first run has one explorer and no accident. The second has two, and each of its
processes is killed with -9 once. The third has another seed.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.runs.run import TrinityRun, kill_process, process_of
from trinity.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS, TASKS, GROUP = 30, 6, 4
KILLED = ("explorer", "trainer", "buffer", "sync", "environment", "nats")
REWARD = """
from trinity.plugins import reward_function


@reward_function("spread")
def spread(item, args):
    ids = list(item.token_ids)
    return len(set(ids)) / max(1, len(ids)) + (sum(ids) % 7) / 7
"""


def config(name: str, folder: Path, model: Path, seed: int = 42) -> dict[str, Any]:
    taskset = {
        "name": "sums", "path": str(folder / "data"), "split": "train",
        "format": {"prompt_key": "question", "response_key": "answer"},
        "default_workflow_type": "simple_workflow", "default_reward_fn_type": "spread",
        "data_selector": {"selector_type": "shuffle", "seed": 1},
    }  # fmt: skip
    return {
        "project": "reproducible",
        "name": name,
        "checkpoint_root_dir": str(folder / "jobs"),
        "reproducible": True,
        "model": {"model_path": str(model), "max_prompt_tokens": 32, "max_response_tokens": 12},
        "algorithm": {"repeat_times": GROUP, "optimizer": {"lr": 1e-3}, "kl_loss_fn": "none"},
        "buffer": {"batch_size": TASKS, "total_steps": STEPS, "explorer_input": {"taskset": taskset}},
        "explorer": {"runner_per_model": 4, "eval_on_startup": False, "rollout_model": {"seed": seed}},
        "synchronizer": {"sync_offset": 1, "versions_to_keep": STEPS + 1},
        "trainer": {"save_interval": 3, "gradient_checkpointing": False, "max_token_len_per_gpu": 4096},
    }  # fmt: skip


class Runs:
    """Runs of the same folder, data and plugin."""

    def __init__(self, repository: Path, model: Path, folder: Path) -> None:
        self.folder, self.model = folder, model
        self._started: list[TrinityRun] = []
        make = [sys.executable, str(repository / "examples/quickstart/make_data.py"), str(folder / "data")]
        subprocess.run([*make, "--test-size", "32"], check=True, timeout=60, capture_output=True)
        (folder / "plugins").mkdir()
        (folder / "plugins/spread.py").write_text(REWARD)

    def start(self, name: str, **changes: Any) -> TrinityRun:
        return self._start(f"{name}.yaml", config(name, self.folder, self.model, **changes))

    def join(self, name: str) -> TrinityRun:
        """A second explorer of a run."""
        values = {key: value for key, value in config(name, self.folder, self.model).items() if key != "reproducible"}
        values = {key: values[key] for key in ("project", "name", "checkpoint_root_dir", "model")}
        explorer = {"name": "second", "runner_per_model": 4}
        return self._start(f"{name}-second.yaml", {**values, "mode": "explore", "explorer": explorer})

    def _start(self, file: str, values: dict[str, Any]) -> TrinityRun:
        path = self.folder / file
        path.write_text(yaml.safe_dump(values))
        debug = {"TRINITY_LOG_LEVEL": "DEBUG"}  # for the lines of single groups
        run = TrinityRun(path, self.folder, TRINITY_PLUGIN_DIRS=str(self.folder / "plugins"), **debug)
        self._started.append(run)
        run.start()
        return run

    def end(self) -> None:
        for run in self._started:
            run.end()


@pytest.fixture(scope="module")
def runs(repository: Path, quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(repository, quickstart_model, tmp_path_factory.mktemp("reproducible"))
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def plain(runs: Runs) -> TrinityRun:
    run = runs.start("plain")
    assert run.finish(400) == 0, run.tail()
    return run


def bisect(one: TrinityRun, other: TrinityRun) -> dict[str, Any]:
    command = [sys.executable, "-m", "trinity.cli.main", "bisect", str(one.job), str(other.job), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return dict(json.loads(done.stdout))


def test_kills_and_another_explorer_change_no_bit(runs: Runs, plain: TrinityRun) -> None:
    run = runs.start("killed")
    status = run.until(lambda s: process_of(s, "trainer")["health"].endswith("SERVING"), 120, "the trainer answers")
    with run.channel(str(process_of(status, "trainer")["address"])) as channel:
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        trainer.Pause(trainer_pb2.PauseRequest(), timeout=120)
        second = runs.join("killed")
        run.until(lambda s: len(s["explorers"]) == 2, 300, "the second explorer")
        trainer.Resume(trainer_pb2.ResumeRequest(), timeout=10)
    for name in KILLED:
        time.sleep(1.0)
        status = run.until(lambda s, name=name: process_of(s, name)["pid"], 60, f"{name} runs")
        assert (status["step"] or 0) < STEPS, f"the run ended before {name} was killed"
        kill_process(status, name)
    assert run.finish(600) == 0, run.tail()
    found = bisect(plain, run)
    assert found == {"steps": list(range(1, STEPS + 1)), "difference": None}
    assert _explorers(run) == {"explorer", "second"}, "both have to have stored groups, or this shows less"
    second.kill()


def test_staleness_was_there(plain: TrinityRun) -> None:
    """Else the runs were synchronous, and this would show less."""
    lines = [json.loads(line) for line in (plain.job / "buffer/experience_buffer.jsonl").read_text().splitlines()]
    assert {line["staleness"] for line in lines} == {0, 1}
    assert all(line["versions"][0][0] == max(0, line["step"] - 2) for line in lines)
    assert len({line["reward"] for line in lines}) > 20


def test_another_seed_is_named(runs: Runs, plain: TrinityRun) -> None:
    other = runs.start("seed", seed=43)
    assert other.finish(400) == 0, other.tail()
    difference = bisect(plain, other)["difference"]
    assert difference["step"] == 1
    assert "token_ids" in difference["where"] and "rollout 0" in difference["where"], difference


def _explorers(run: TrinityRun) -> set[str]:
    stored = set()
    for name in ("explorer", "second"):
        log = run.job / f"log/{name}.log"
        if log.exists() and "explorer.group.stored" in log.read_text():
            stored.add(name)
    return stored
