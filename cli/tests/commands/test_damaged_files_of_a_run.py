"""Files of a job folder that hold other JSON than was written: what they would say is not known, and nothing breaks."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trinity.cli.commands.status import status
from trinity.reading import job as jobs

pytestmark = pytest.mark.core


@pytest.mark.parametrize("summary", [[1, 2], "x", 7, None])
def test_a_summary_that_is_none_says_nothing(summary: Any, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert status(tmp_path).splitlines()[0] == f"{tmp_path}: stopped, no process lives"
    assert json.loads(status(tmp_path, as_json=True))["summary"] is None


def test_a_summary_cannot_command_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"eval_after": "\x1b[2J\ud800"}))
    assert "  eval_after: \\x1b[2J\\ud800" in status(tmp_path).splitlines()


@pytest.mark.parametrize(
    "finished",
    [
        {}, [1], {"step": 4}, {"step": "4", "summary": {}}, {"step": 4, "summary": [1]}, {"step": 4, "summary": {}},
        *({"step": 4, "summary": {"wall_seconds": one}} for one in (None, "9", True, [9], -1, math.nan, math.inf)),
    ],
)  # fmt: skip
def test_a_stage_with_a_damaged_end_has_not_finished(finished: Any, tmp_path: Path) -> None:
    (tmp_path / "finished.json").write_text(json.dumps(finished))
    assert (jobs.finished_step(tmp_path), jobs.finished_summary(tmp_path)) == (-1, {})
    jobs.mark_finished(tmp_path, 4, {"wall_seconds": 1.0})
    assert (jobs.finished_step(tmp_path), jobs.finished_summary(tmp_path)) == (4, {"wall_seconds": 1.0})
