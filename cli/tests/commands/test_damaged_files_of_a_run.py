"""Files of a job folder that hold other JSON than was written: what they would say is not known, and nothing breaks."""

import json
from pathlib import Path
from typing import Any

import pytest

from trinity.cli.commands.ledger.replay_report import circumstances, metrics_by_step
from trinity.cli.commands.status import status
from trinity.cli.supervise import job as jobs

pytestmark = pytest.mark.core


@pytest.mark.parametrize("summary", [[1, 2], "x", 7, None])
def test_a_summary_that_is_none_says_nothing(summary: Any, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert status(tmp_path).splitlines()[0] == f"{tmp_path}: stopped, no process lives"
    assert json.loads(status(tmp_path, as_json=True))["summary"] is None


@pytest.mark.parametrize("finished", [{}, [1], {"step": 4}, {"step": "4", "summary": {}}, {"step": 4, "summary": [1]}])
def test_a_stage_with_a_damaged_end_has_not_finished(finished: Any, tmp_path: Path) -> None:
    (tmp_path / "finished.json").write_text(json.dumps(finished))
    assert (jobs.finished_step(tmp_path), jobs.finished_summary(tmp_path)) == (-1, {})
    jobs.mark_finished(tmp_path, 4, {"wall_seconds": 1.0})
    assert (jobs.finished_step(tmp_path), jobs.finished_summary(tmp_path)) == (4, {"wall_seconds": 1.0})


def test_lines_without_a_step_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "monitor").mkdir()
    lines = [{"step": step, "actor/x": 1.0} for step in (None, "1", [1], True, 2)]
    for name in ("trainer", "batches"):
        (tmp_path / f"monitor/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert metrics_by_step(tmp_path) == {2: {"actor/x": 1.0}}
    assert list(circumstances(tmp_path)) == [2]
