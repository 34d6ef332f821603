"""Files of a job folder that hold other JSON than was written: what they would say is not known, and nothing breaks."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trinity.cli.commands.ledger.replay_report import Weights, circumstances
from trinity.cli.commands.status import status
from trinity.reading import job as jobs
from trinity.reading.bisect import metrics_by_step
from trinity.reading.errors import RunError

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


def test_lines_without_a_step_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "monitor").mkdir()
    lines = [{"step": step, "actor/x": 1.0} for step in (None, "1", [1], True, 2)]
    for name in ("trainer", "batches"):
        (tmp_path / f"monitor/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert metrics_by_step(tmp_path) == {2: {"actor/x": 1.0}}
    assert list(circumstances(tmp_path)) == [2]


@pytest.mark.parametrize("value", ["x", [1.0], {}, {"a": 1}])
def test_what_is_no_metric_is_not_compared(value: Any, tmp_path: Path) -> None:
    (tmp_path / "monitor").mkdir()
    line = {"step": 1, "actor/x": 1.0, "actor/y": None, "actor/z": value}
    (tmp_path / "monitor/trainer.jsonl").write_text(json.dumps(line) + "\n")
    assert metrics_by_step(tmp_path) == {1: {"actor/x": 1.0, "actor/y": None}}


@pytest.mark.parametrize("value", [None, "2", [2], {}, 2.0])
def test_circumstances_of_another_type_were_not_noted(value: Any, tmp_path: Path) -> None:
    (tmp_path / "monitor").mkdir()
    known = {"device": "cpu", "threads": 2}
    line = {"step": 1, "groups": [3], **known, "ranks": value, "micro_batch_tokens": value}
    (tmp_path / "monitor/batches.jsonl").write_text(json.dumps(line) + "\n")
    assert circumstances(tmp_path) == {1: known}


@pytest.mark.parametrize("weights", [[1], 7, {}, {"step": 2}, {"step": 2, "compared": True, "different": [1]}])
def test_a_comparison_of_weights_that_says_nothing_is_named(weights: Any, tmp_path: Path) -> None:
    (tmp_path / "weights.json").write_text(json.dumps(weights))
    with pytest.raises(RunError, match=r"weights\.json does not say how the weights compare"):
        Weights.read(tmp_path / "weights.json")


def test_the_comparison_of_weights_is_read_as_the_trainer_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    file.write_text(json.dumps({"step": 2, "compared": False}))
    assert Weights.read(file) == Weights(2, False, 0, {})
    file.write_text(json.dumps({"step": 2, "compared": True, "tensors": 3, "different": {"a": None, "b": 0.5}}))
    assert Weights.read(file) == Weights(2, True, 3, {"a": None, "b": 0.5})
