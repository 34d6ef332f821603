"""`trinity status` of a run that is not live: finished, failed with its reason, or stopped."""

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trinity.cli.main import app
from trinity.cli.supervise.stage import supervisor
from trinity.config import Config
from trinity.reading import job as jobs
from trinity.reading import run_record
from trinity.reading.ending import Interrupted
from trinity.reading.errors import RunError
from trinity.runtime import files

pytestmark = pytest.mark.core


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of a run whose stages need neither model nor data."""
    monkeypatch.setattr(supervisor, "_unfinished", lambda config, source: [config.name])
    given = {"project": "p", "name": "n", "checkpoint_root_dir": str(tmp_path), "model": {"model_path": "m"}}
    return Config.model_validate(given)


def end(config: Config, monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
    async def supervise(config: Config, source: str, job: jobs.Job, only: str) -> None:
        assert not (job.folder / "summary.json").exists(), "the summary of the run before is gone"
        (job.folder / "log").mkdir(exist_ok=True)
        (job.folder / "config.json").write_text("{}")
        if error is not None:
            raise error
        files.write_json(job.folder / "summary.json", {"steps": 160})

    monkeypatch.setattr(supervisor, "_supervise", supervise)
    supervisor.run(config, "run.yaml")


def status(folder: Path) -> tuple[str, dict[str, Any]]:
    told = [CliRunner().invoke(app, ["status", "--job", str(folder), *more]).stdout for more in ([], ["--json"])]
    return told[0], json.loads(told[1])


def test_a_continued_run_that_stops_is_not_finished(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = jobs.Job(config).folder
    end(config, monkeypatch, None)
    assert status(folder)[1]["state"] == "finished"
    with pytest.raises(Interrupted):
        end(config, monkeypatch, Interrupted("ended by SIGINT", 130))
    text, found = status(folder)
    assert (found["state"], found["reason"], found["summary"]) == ("stopped", None, None)
    assert "stopped" in text and "resumes it" in text


def trained(folder: Path, *steps: int, last: int) -> None:
    """Writes the trainer's notes of these steps, the last of which a crash cut off."""
    (folder / "monitor").mkdir(parents=True, exist_ok=True)
    (folder / "log").mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    lines = [json.dumps({"step": step, "groups": [], "last_step": last}) for step in steps]
    (folder / "monitor" / "batches.jsonl").write_text("\n".join([*lines, '{"step": 9']))


def test_a_stopped_run_says_how_far_it_came(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = jobs.Job(config).folder
    run_record.mark_folder(folder)
    trained(folder, 145, 146, 147, last=160)
    with pytest.raises(Interrupted):
        end(config, monkeypatch, Interrupted("ended by SIGINT", 130))
    text, found = status(folder)
    assert found["trained"] == {"step": 147, "last_step": 160, "stage": ""}
    assert "trained step 147 of 160\n" in text


def test_a_stage_is_named_and_a_finished_run_needs_no_progress(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = jobs.Job(config).folder
    run_record.mark_folder(folder)
    trained(folder / "warm", 3, last=12)
    with pytest.raises(RunError):
        end(config, monkeypatch, RunError("no space left on device: /data"))
    assert "trained step 3 of 12 of stage warm" in status(folder)[0]
    end(config, monkeypatch, None)
    assert "trained step" not in status(folder)[0]


def test_a_killed_run_is_told_from_one_that_was_stopped(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = jobs.Job(config).folder
    with pytest.raises(Interrupted):
        end(config, monkeypatch, Interrupted("ended by SIGTERM", 143))
    assert status(folder)[1]["reason"] is None
    gone = subprocess.Popen(["true"])
    gone.wait()
    files.write_json(folder / "run" / "main.json", {"pid": gone.pid, "host": socket.gethostname()})
    text, found = status(folder)
    assert found["state"] == "stopped"
    assert f"`trinity run` (process {gone.pid}) was killed, or the machine went down" in text


def test_a_run_of_another_machine_is_live_while_it_holds_the_folder(config: Config) -> None:
    """The command runs on a login node, or beside the container of the run."""
    job = jobs.Job(config)
    run_record.mark_folder(job.folder)
    trained(job.folder, 3, last=12)
    lock = job.lock()
    assert lock.acquire()
    job.write_record("main", jobs.SupervisorRecord(7, "both", "r", "", "nats://127.0.0.1:1", host="node7"))
    text, found = status(job.folder)
    assert found["state"] == "live" and "process 7 on node7) holds this folder" in text and "resumes" not in text
    lock.release()
    text, found = status(job.folder)
    assert found["state"] == "stopped" and "was killed" in text and "resumes" in text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RunError("trainer ended with exit code 1: CUDA out of memory"), "trainer ended with exit code 1: CUDA out of"),
        (ExceptionGroup("all", [OSError(28, "No space left on device", "/data/log")]), "/data/log: No space left"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
def test_a_failed_run_shows_its_reason_until_it_runs_again(
    error: Exception, reason: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = jobs.Job(config).folder
    with pytest.raises(type(error)):
        end(config, monkeypatch, error)
    text, found = status(folder)
    assert found["state"] == "failed" and found["reason"].startswith(reason)
    assert "failed, no process lives" in text and reason in text and "resumes it" in text
    end(config, monkeypatch, None)
    assert status(folder)[1]["state"] == "finished"
