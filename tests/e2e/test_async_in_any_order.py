"""examples/async_gsm8k, a command for each side, in any order; an explorer may bring tasks of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trinity.reading.job import read_records

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 24
SMALL = [
    f"buffer.total_steps={STEPS}",
    "buffer.train_batch_size=32",
    "synchronizer.sync_interval=2",
    "model.max_model_len=256",
    "model.max_response_tokens=24",
    "trainer.save_interval=2",
]


class Command:
    """`trinity run` with one of the example's YAMLs."""

    def __init__(self, repository: Path, name: str, folder: Path, environment: dict[str, str], *changes: str) -> None:
        self.output = folder / f"{name}-{time.monotonic_ns()}.out"
        yaml = repository / "examples/async_gsm8k" / f"{name}.yaml"
        command = [sys.executable, "-m", "trinity.cli.main", "run", "--config", str(yaml), *SMALL, *changes]
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)

    def until(self, text: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.output.read_text(errors="replace"):
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, f"no {text!r}: {self.output.read_text()}"
            time.sleep(0.2)

    def until_exists(self, path: Path, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not path.exists():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, f"no {path}: {self.output.read_text()}"
            time.sleep(0.1)

    def finish(self, seconds: float) -> str:
        assert self.process.wait(timeout=seconds) == 0, self.output.read_text()
        return self.output.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()


def test_an_explorer_waits_for_its_run_and_for_its_return(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "TRINITY_CHECKPOINT_ROOT_DIR": str(tmp_path / "jobs"),
        "TRINITY_MODEL_PATH": str(quickstart_model),
        "TRINITY_TASKSET_PATH": str(quickstart_data),
    }
    job = tmp_path / "jobs/Trinity-RFT-gsm8k/async_gsm8k"
    hosting = {**environment, "TRINITY_HOST": "127.0.0.2"}  # the explorer's TRINITY_HOST is another
    explorer = Command(repository, "explorer", tmp_path, environment)
    commands = [explorer]
    try:
        explorer.until("looking for the run", 60)
        trainer = Command(repository, "trainer", tmp_path, hosting)
        commands.append(trainer)
        explorer.until("joins", 60)
        checkpoint = job / "latest_checkpointed_iteration.txt"
        trainer.until_exists(checkpoint, 200)
        addresses = {p.service: p.address for p in read_records(job)["main"].processes}
        assert all(addresses[name].startswith("127.0.0.2:") for name in ("buffer", "environment", "sync", "trainer"))
        trainer.process.send_signal(signal.SIGTERM)
        assert trainer.process.wait(timeout=60) == 128 + signal.SIGTERM
        explorer.until("the run is gone", 60)
        again = Command(repository, "trainer", tmp_path, hosting)
        commands.append(again)
        again.finish(300)
        assert "the run has ended" in explorer.finish(60)
    finally:
        for command in commands:
            command.end()
    summary = json.loads((job / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["groups_fed"] == summary["groups_stored"] == 4 * STEPS
    steps = [json.loads(line)["step"] for line in (job / "monitor/trainer.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))


def test_a_joining_explorer_brings_tasks_of_its_own_and_is_killed(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "TRINITY_CHECKPOINT_ROOT_DIR": str(tmp_path / "jobs"),
        "TRINITY_MODEL_PATH": str(quickstart_model),
        "TRINITY_TASKSET_PATH": str(quickstart_data),
    }
    own = tmp_path / "own"
    shutil.copytree(quickstart_data, own)
    joining = {**environment, "TRINITY_TASKSET_PATH": str(own)}
    job = tmp_path / "jobs/Trinity-RFT-gsm8k/async_gsm8k"
    commands = [Command(repository, name, tmp_path, environment) for name in ("trainer", "explorer")]
    trainer, explorer = commands
    try:
        explorer.until("joins", 120)
        new = Command(repository, "explorer_new", tmp_path, joining)
        commands.append(new)
        new.until("as taskset 'explorer_new-gsm8k'", 60)
        trainer.until_exists(job / "latest_checkpointed_iteration.txt", 200)
        assert new.process.poll() is None
        new.process.kill()
        trainer.finish(300)
        assert "the run has ended" in explorer.finish(60)
    finally:
        for command in commands:
            command.end()
    summary = json.loads((job / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["groups_fed"] == summary["groups_stored"] == 4 * STEPS
    lines = (job / "buffer/experience_buffer.jsonl").read_text().splitlines()
    tasksets = {json.loads(line)["task_id"].split("/")[0] for line in lines}
    assert tasksets == {"gsm8k", "explorer_new-gsm8k"}
