"""`--job` with the folder of a stage in place of the job's."""

from pathlib import Path

import pytest

from trinity.cli.commands.find import find_job
from trinity.cli.errors import RunError

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


def test_a_job_without_stages_is_one(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "config.json").write_text("{}")
    assert find_job(job=tmp_path) == tmp_path
