"""`--job` and `trinity status` of a job with stages, of one without, and of a run without a trainer."""

from pathlib import Path
from typing import Any

import pytest

from trinity.cli.commands import status
from trinity.reading.errors import RunError
from trinity.reading.find import find_job, jobs_root
from trinity.reading.job import stage_configs

pytestmark = pytest.mark.core


def test_the_folder_of_a_stage_is_no_job(tmp_path: Path) -> None:
    job, stage = tmp_path / "job", tmp_path / "job" / "rft"
    (stage / "log").mkdir(parents=True)
    (stage / "config.json").write_text("{}")
    (stage / ".lock").touch()  # as an older command left it
    (job / "version.json").write_text("{}")
    assert find_job(job=job) == job
    with pytest.raises(RunError, match=f"rft is the folder of a stage; give its job's: --job {job}$") as refused:
        find_job(job=stage)
    assert refused.value.code == 2


def test_a_fork_that_nobody_has_started_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "fork.yaml").write_text("{}")
    with pytest.raises(RunError, match=f"no run has begun in {tmp_path}; trinity run --config {tmp_path}/fork.yaml"):
        find_job(job=tmp_path)


def test_a_folder_of_jobs_is_no_job(tmp_path: Path) -> None:
    """Its status would be that of whichever stage is newest."""
    for name in ("a/one/rft", "a/two/rft"):
        (stage := tmp_path / name / "log").mkdir(parents=True)
        (stage.parent / "config.json").write_text("{}")
        (stage.parents[1] / "version.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "a"):
        with pytest.raises(RunError, match=rf"is no job but holds jobs; give one: --job {tmp_path}/a/one, or one of 1"):
            find_job(job=folder)
    assert find_job(job=tmp_path / "a/two") == tmp_path / "a/two"


def test_a_repetition_in_the_folder_of_a_run_is_no_stage_of_it(tmp_path: Path) -> None:
    for stage in ("rft", "rft/replay/fresh/p/n-fresh/rft"):
        (tmp_path / stage / "log").mkdir(parents=True)
        (tmp_path / stage / "config.json").write_text("{}")
    assert stage_configs(tmp_path) == [tmp_path / "rft/config.json"]


def test_the_root_of_the_runs_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", "~/runs")
    assert jobs_root() == tmp_path / "runs"


def test_a_job_without_stages_is_one(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "config.json").write_text("{}")
    assert find_job(job=tmp_path) == tmp_path


def lines(**changes: Any) -> list[str]:
    found: dict[str, Any] = {"job": "/j", "run": "r", "stage": "", "mode": "both", "step": 1, "last_step": 2}
    found |= {"trainer_state": "training", "waiting_for": "", "processes": [], "alarms": [], "weights": None}
    shown = status.render(found | {"explorers": [], "groups": None} | changes)
    return [line for line in shown.splitlines() if line and not line.startswith("name ")]


def test_a_job_without_stages_has_no_brackets() -> None:
    assert lines() == ["/j", "step 1/2 (training)"]
    assert lines(stage="rft")[0] == "/j (rft)"


@pytest.mark.parametrize("mode", ["serve", "bench", "explore"])
def test_what_has_no_trainer_shows_its_mode_and_no_step(mode: str) -> None:
    assert lines(mode=mode, step=None, last_step=None, trainer_state=None) == [f"/j (mode {mode})"]
