"""Commands about a job that does not run name a way that helps it: unfinished, finished, or on a dataset."""

import asyncio
import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from support.fakes.data.files import write
from support.fakes.pages.recorded_run import make_job
from trinity.inspect import env, explorers, versions
from trinity.inspect.dead_letters import Change, change_letters
from trinity.inspect.view import view
from trinity.reading.errors import RunError
from trinity.reading.job import mark_finished
from trinity.reading.reader import JobStage, find_job_stage

pytestmark = pytest.mark.core

COMMANDS: tuple[Callable[[JobStage], Any], ...] = (
    explorers.list_explorers,
    lambda stage: versions.list_versions(stage, 20, False),
    env.list_providers,
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TRINITY_NATS_URL", raising=False)
    return make_job(tmp_path / "job")


def on_a_dataset(job: Path) -> Path:
    config = json.loads((job / "config.json").read_text())
    read = {"name": "worked", "storage_type": "file", "path": str(job)}
    config |= {"mode": "train", "algorithm": {"algorithm_type": "sft"}}
    config["buffer"] = {"train_batch_size": 2, "total_steps": 9, "trainer_input": {"experience_buffer": read}}
    (job / "config.json").write_text(json.dumps(config))
    (job / "buffer/experience_buffer.jsonl").unlink()
    return job


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("finished_step", "way"), [
    (None, "does not run, .* `trinity run` with the same YAML, then again"),
    (6, "does not run, .* `trinity run` with the same YAML, then again"),  # 9 are wanted now
    (9, r"has finished, .* with the same YAML and more steps \(buffer\.total_steps=\.\.\.\), then again"),
])  # fmt: skip
def test_a_finished_job_needs_more_steps(
    job: Path, command: Callable[[JobStage], Any], finished_step: int | None, way: str
) -> None:
    if finished_step is not None:
        mark_finished(job, finished_step, {"wall_seconds": 1.0})
    with pytest.raises(RunError, match=way):
        command(find_job_stage(job=job))


def test_letters_of_a_finished_job_need_more_steps(job: Path) -> None:
    mark_finished(job, 9, {"wall_seconds": 1.0})
    with pytest.raises(RunError, match=r"has finished, .* and more steps .*, then drop again"):
        change_letters(find_job_stage(job=job), Change("drop", (3,), False), False)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_job_on_a_dataset_has_no_explorers(job: Path, command: Callable[[JobStage], Any]) -> None:
    with pytest.raises(RunError, match="learns from a dataset, without explorers: it publishes no versions"):
        command(find_job_stage(job=on_a_dataset(job)))


def test_a_job_on_a_dataset_keeps_no_experience(tmp_path: Path) -> None:
    job = on_a_dataset(make_job(tmp_path / "my job"))
    with pytest.raises(RunError, match="learns from a dataset, and has trained no step yet"):
        view(job, None)
    write(job / "monitor/batches.jsonl", '{"step": 1}\n', '{"step": 2}\n')
    with pytest.raises(RunError) as raised:
        view(job, None)
    command = shlex.split(str(raised.value).split("`")[1])
    assert command == ["trinity", "batch", "show", "2", "--job", str(job)]


@pytest.mark.parametrize("of_stage", [False, True])
def test_a_stage_on_a_dataset_keeps_no_experience(job: Path, of_stage: bool) -> None:
    stage = on_a_dataset(job).rename(job.with_name("warm"))
    job.mkdir()
    stage.rename(job / "warm")
    write(job / "version.json", "{}")
    write(job / "warm/monitor/batches.jsonl", '{"step": 2}\n')
    with pytest.raises(RunError, match=rf"`trinity batch show 2 --job {job} --stage warm` lists its rows"):
        view(find_job_stage(job=job) if of_stage else job, None)


def test_a_run_on_a_dataset_that_only_nats_knows_is_named_by_it(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = AsyncMock(**{"newest_step.return_value": 2, "entry_with_texts.return_value": {"groups": []}})
    monkeypatch.setattr("trinity.study.view.ask", lambda _, __, read: asyncio.run(read(Mock(buffer=buffer))))
    stage = dataclasses.replace(find_job_stage(job=job), folders=None, nats_url="nats://host:4222")
    with pytest.raises(RunError, match=f"`trinity batch show 2 --nats nats://host:4222 --run {stage.run}` lists"):
        view(stage, None)
