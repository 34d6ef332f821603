"""Helpers for runs of compose.yaml and of the chart: model, tasks, YAML, and the trainer as operators call it."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from e2e.deployed.warm_model import warm_up
from trinity.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from trinity.runtime import rpc
from trinity.runtime.trust.identity import Identity


def write_run(repository: Path, path: Path, *, steps: int, groups: int) -> Path:
    """The YAML of the quickstart's GRPO stage, short, with model and data below /data."""
    config = yaml.safe_load((repository / "examples/quickstart/arithmetic.yaml").read_text())
    del config["stages"]
    config |= {"name": "rft", "checkpoint_root_dir": "/data/checkpoints"}
    config["model"]["model_path"] = "/data/model"
    config["buffer"] |= {"batch_size": groups, "total_steps": steps}
    source = config["buffer"]["explorer_input"]
    for taskset in (source["taskset"], *source["eval_tasksets"]):
        taskset["path"] = "/data/sums"
    config["explorer"]["eval_interval"] = steps
    config["trainer"]["save_interval"] = 4
    path.write_text(yaml.safe_dump(config))
    return path


def fill(data: Path, model: Path, sums: Path) -> None:
    """The folder that is /data: a model that knows some sums already, and sums."""
    data.mkdir(exist_ok=True)
    warm_up(model, sums / "train.jsonl", data / "model")
    shutil.copytree(sums, data / "sums")


def until(condition: Callable[[], object], wait_seconds: float, what: str) -> None:
    deadline = time.monotonic() + wait_seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {wait_seconds:g} s"
        time.sleep(3)  # a health check is a process


class Trainer:
    """The trainer of a run, as an operator calls it."""

    def __init__(self, address: str, identity: Identity) -> None:
        self._stub = trainer_pb2_grpc.TrainerServiceStub(rpc.blocking_channel(address, identity=identity))

    @property
    def step(self) -> int:
        return self._stub.Status(trainer_pb2.StatusRequest(), wait_for_ready=True, timeout=60).step

    def train_a_step(self) -> None:
        """For a step at least; the trainer is paused after it, so that the run does not end before it was looked at."""
        before, deadline = self.step, time.monotonic() + 600
        self.resume()
        while self.step == before:
            assert time.monotonic() < deadline, f"no step after {before} within 600 s"
            time.sleep(0.1)
        self.pause()

    def pause(self) -> None:
        self._stub.Pause(trainer_pb2.PauseRequest(), wait_for_ready=True, timeout=120)

    def resume(self) -> None:
        self._stub.Resume(trainer_pb2.ResumeRequest(), wait_for_ready=True, timeout=60)
