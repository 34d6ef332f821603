"""`trinity run --stage`: one stage, once those before it have saved their last step; the wait has a limit."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from trinity.cli.supervise.processes.devices import Placement
from trinity.cli.supervise.stage import supervisor
from trinity.cli.supervise.stage.display import Pages, make_display
from trinity.config import Config, ConfigError, Plan, dump, expand, load, make_plan
from trinity.reading import job as jobs
from trinity.reading.errors import RunError
from trinity.reading.nats import NatsAccess
from trinity.runtime import files
from trinity.weights.checkpoints import COMPLETE, checkpoint_folder, model_folder

pytestmark = pytest.mark.core

LAST = 4
_LIMIT_SECONDS = 60.0


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "project": "p",
            "name": "n",
            "checkpoint_root_dir": str(tmp_path),
            "allow_unverified_checkpoint": True,
            "stages": [{"stage_name": "sft", "mode": "train"}, {"stage_name": "rft"}, {"stage_name": "more"}],
        }
    )


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages that were started. Model, data and processes are not looked at: the commands' own tests do that."""
    found: list[str] = []

    async def supervise(config: Config, source: str, job: jobs.Job, only: str) -> None:
        found.append(only)

    monkeypatch.setattr(supervisor, "_supervise", supervise)
    monkeypatch.setattr(supervisor, "check_inputs", lambda plan, source: LAST)
    monkeypatch.setattr(supervisor, "_POLL_SECONDS", 0.01)
    return found


def folder_of(config: Config, stage: int) -> Path:
    return make_plan(expand(config)[stage]).job_dir


def save(folder: Path, step: int) -> None:
    """A complete checkpoint with a model, as a trainer without a supervisor leaves it."""
    model_folder(folder, step).mkdir(parents=True)
    save_file({"w": np.zeros(1)}, model_folder(folder, step) / "model.safetensors")
    (checkpoint_folder(folder, step) / COMPLETE).touch()


def test_it_says_what_it_waits_for_and_no_longer_than_it_may(
    config: Config, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sft = folder_of(config, 0)
    said = f"stage sft, which has saved step {{}} of {LAST} in {sft}"
    with pytest.raises(RunError) as caught:
        supervisor.run(config, "x.yaml", "rft", 0.05)
    assert str(caught.value) == f"stage rft has waited long enough for {said.format(0)}; --wait sets the seconds"
    save(sft, LAST - 1)
    with pytest.raises(RunError, match="has saved step 3 of 4"):
        supervisor.run(config, "x.yaml", "rft", 0.05)
    assert capsys.readouterr().out.splitlines() == [f"stage rft waits for {said.format(step)}" for step in (0, 3)]
    assert started == []


@pytest.mark.parametrize("supervised", [True, False])
def test_it_starts_once_the_stage_before_has_saved_its_last_step(
    config: Config, started: list[str], supervised: bool
) -> None:
    sft = folder_of(config, 0)

    def finish() -> None:
        jobs.mark_finished(sft, LAST, {"wall_seconds": 1.0}) if supervised else save(sft, LAST)

    timer = threading.Timer(0.2, finish)
    timer.start()
    supervisor.run(config, "x.yaml", "rft", _LIMIT_SECONDS)
    timer.join()
    assert started == ["rft"]
    supervisor.run(config, "x.yaml", "sft", _LIMIT_SECONDS)
    assert started == (["rft"] if supervised else ["rft", "sft"]), "the first waits for none, nor runs again"


def test_a_finished_run_names_keys_that_come_too_late(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml, place = repository / "examples/quickstart/arithmetic.yaml", f"checkpoint_root_dir={tmp_path}"
    config = load(yaml, [place])
    for number, stage in enumerate(expand(config)):
        jobs.mark_finished(folder_of(config, number), LAST, {"wall_seconds": 1.0})
        made = stage.model.model_copy(update={"model_path": "of the stage before"}) if number else stage.model
        files.write_json(folder_of(config, number) / "config.json", dump(stage.model_copy(update={"model": made})))
    supervisor.run(config, "x.yaml")
    assert len(capsys.readouterr().out.splitlines()) == 1
    supervisor.run(load(yaml, [place, "buffer.batch_size=9", "algorithm.kl_loss_fn=k1"]), "x.yaml")
    assert capsys.readouterr().out.splitlines()[1] == (
        "without effect on it: algorithm.kl_loss_fn, buffer.batch_size; name=... begins another run with them"
    )


def test_steps_of_a_dataset_keep_their_rows(tmp_path: Path, started: list[str]) -> None:
    """Another number would skip rows or repeat them."""

    def of(rows: int, path: str) -> Plan:
        rows_of = {"experience_buffer": {"name": "d", "path": path}}
        values: dict[str, Any] = {"mode": "train", "project": "p", "name": "n", "checkpoint_root_dir": str(tmp_path)}
        algorithm = {"algorithm_type": "sft"}
        values |= {"model": {"model_path": "m"}}
        buffer = {"train_batch_size": rows, "total_steps": 4, "trainer_input": rows_of}
        return make_plan(Config.model_validate({**values, "algorithm": algorithm, "buffer": buffer}))

    begun = of(8, "d.jsonl")
    assert supervisor._changes(begun) == set(), "it has not begun"
    files.write_json(begun.job_dir / "config.json", dump(begun.config))
    assert supervisor._changes(begun) == set()
    other = of(8, "e.jsonl")
    changed = supervisor._changes(other)
    assert changed == {"buffer.trainer_input.experience_buffer.path"}
    supervisor.run(other.config, "x.yaml")
    assert started == [""]
    with pytest.raises(ConfigError) as refused:
        supervisor.run(of(4, "d.jsonl").config, "x.yaml")
    assert started == [""] and str(refused.value) == (
        f"x.yaml: buffer.train_batch_size: makes steps of 4 rows, and {begun.job_dir} began with steps of 8; keep it, "
        "begin another run by name=..., or remove the folder"
    )


def test_a_run_waits_for_commands_and_pages_that_read_its_folder(
    config: Config, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = jobs.Job(config).lock()
    assert lock.acquire(jobs.READS)
    monkeypatch.setattr(supervisor, "_READ_SECONDS", 0.0)
    with pytest.raises(RunError, match=rf"process {os.getpid()} reads .*; end it, or try again"):
        supervisor.run(config, "x.yaml")
    monkeypatch.setattr(supervisor, "_READ_SECONDS", 30.0)
    timer = threading.Timer(0.2, lock.release)
    timer.start()
    supervisor.run(config, "x.yaml")
    timer.join()
    assert started == [""]


def test_it_waits_for_the_lock_of_the_stage_before(config: Config, started: list[str]) -> None:
    save(folder_of(config, 0), LAST)
    lock = jobs.Job(config).lock()
    assert lock.acquire()
    with pytest.raises(RunError, match="is in use by a live run"):
        supervisor.run(config, "x.yaml", "rft", 0.05)
    timer = threading.Timer(0.2, lock.release)
    timer.start()
    supervisor.run(config, "x.yaml", "rft", _LIMIT_SECONDS)
    timer.join()
    assert started == ["rft"]


def test_names_and_runs_that_cannot_be_meant_are_refused(config: Config, started: list[str]) -> None:
    with pytest.raises(RunError, match=r"^--stage other: x\.yaml has sft, rft, more$"):
        supervisor.run(config, "x.yaml", "other")
    with pytest.raises(RunError, match=r"^--stage rft: x\.yaml has no stages$"):
        supervisor.run(config.model_copy(update={"stages": []}), "x.yaml", "rft")
    with pytest.raises(RunError, match="each command begins another run"):
        supervisor.run(config.model_copy(update={"continue_from_checkpoint": False}), "x.yaml", "rft")
    assert started == []


class _Stage:
    """In place of the processes of a stage: it trains nothing and is finished at once."""

    ran: list[tuple[str, str, bool]] = []  # noqa: RUF012

    def __init__(self, job: jobs.Job, plan: Plan, *_: Any, is_last: bool) -> None:
        self.ran.append((plan.config.name, plan.config.model.model_path, is_last))
        self._name = plan.config.name

    def prepare(self) -> None:
        pass

    async def run(self, *_: Any) -> dict[str, Any]:
        return {"stage": self._name, "steps": LAST, "wall_seconds": 1.0}


def test_the_stage_alone_runs_with_the_model_before_it(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Stage, "ran", [])
    monkeypatch.setattr(supervisor, "Stage", _Stage)
    monkeypatch.setattr(supervisor, "machine_problems", lambda plan: [])
    monkeypatch.setattr(supervisor, "place", lambda *_: Placement("cpu", [], [], 1))
    job = jobs.Job(config)
    with make_display() as display:
        for number, only in enumerate(("rft", "more")):
            save(folder_of(config, number), LAST)
            pages = Pages(config, job.folder, display.say)
            run = supervisor._run_stages(config, "x", job, NatsAccess(""), [], display, asyncio.Event(), only, pages)
            asyncio.run(run)
            assert (job.folder / "summary.json").exists() is (only == "more"), "it says that the whole run is finished"
    models = [str(model_folder(folder_of(config, number), LAST)) for number in (0, 1)]
    assert _Stage.ran == [("n/rft", models[0], False), ("n/more", models[1], True)]
    summary = json.loads((job.folder / "summary.json").read_text())
    assert [part["stage"] for part in summary["stages"]] == ["n/rft", "n/more"]


def test_a_full_disk_hides_no_reason(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(folder: Path, reason: str) -> None:
        raise OSError(28, "No space left on device", str(folder / "failed.json"))

    async def fails(*_: Any) -> None:
        raise RunError("the trainer cannot continue: its reason")

    save(folder_of(config, 0), LAST)
    monkeypatch.setattr(supervisor, "_supervise", fails)
    monkeypatch.setattr(supervisor.jobs, "mark_failed", full)
    with pytest.raises(RunError, match="the trainer cannot continue: its reason"):
        supervisor.run(config, "x.yaml", "rft", 0.05)
    assert "No space left on device" in capsys.readouterr().err
