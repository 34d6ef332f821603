"""Metrics and TensorBoard's files stay within their limits; the newest lines stay."""

import json
from pathlib import Path

import pytest

from trinity.runtime.files import keep_newest_lines
from trinity.runtime.monitor import MonitorOptions, open_monitor

pytestmark = pytest.mark.core


def test_the_newest_lines_stay_whole(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    lines = [f"{number:09d}\n" for number in range(100)]
    file.write_text("".join(lines))
    keep_newest_lines(file, None)
    keep_newest_lines(file, 1000)
    assert file.read_text() == "".join(lines)
    file.write_text("".join([*lines, "last\n"]))
    keep_newest_lines(file, 1000)
    assert file.read_text() == "".join([*lines[-49:], "last\n"])
    assert [path.name for path in tmp_path.iterdir()] == ["lines"]


def test_metrics_of_a_long_run_take_no_more_than_they_may(tmp_path: Path) -> None:
    most = 20_000
    options = MonitorOptions("tensorboard", {}, "p", "", "n_trainer", "trainer", tmp_path, {}, most)
    monitor = open_monitor(options)
    for step in range(1, 501):
        monitor.log({f"metric/{number}": float(step) for number in range(5)}, step)
    monitor.close()
    lines = (tmp_path / "trainer.jsonl").read_text().splitlines()
    assert (tmp_path / "trainer.jsonl").stat().st_size <= most
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(steps[0], 501)) and len(steps) > 30
    events = list((tmp_path / "tensorboard/trainer").iterdir())
    assert most / 2 < sum(file.stat().st_size for file in events) <= most
