"""The judge of short runs finds what it is there for, in folders as runs leave them."""

import json
from pathlib import Path

import pytest

from chaos.short_cases import judge

pytestmark = pytest.mark.core


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """What a good run leaves: the trainer was killed once."""
    for name, starts in (("trainer", 2), ("buffer", 1)):
        log = tmp_path / f"job/rft/log/{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        events = ["service.started"] * starts + ["service.stopped"]
        log.write_text("".join(json.dumps({"event": event}) + "\n" for event in events))
        log.with_suffix(".out").write_text("well\n")
    (tmp_path / "run.out").write_text("stage rft is finished\n")
    return tmp_path / "run.out"


def test_a_good_run_is_good(output: Path) -> None:
    assert judge(output.parent / "job", output, 0, [], {"trainer": 1}) == []


def test_what_was_started_again_without_a_kill_is_found(output: Path) -> None:
    found = judge(output.parent / "job", output, 0, [], {})
    assert found == [("again", "trainer was started 2 times, killed 0 times")]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("job/rft/log/trainer.out", "terminate called without an active exception"),
        ("job/rft/log/buffer.out", "Fatal Python error: Aborted"),
        ("run.out", "level='error' event='run.process.finished_with_error' name='trainer'"),
    ],
)
def test_an_abort_is_found(file: str, line: str, output: Path) -> None:
    with (output.parent / file).open("a") as out:
        out.write(line + "\n")
    found = judge(output.parent / "job", output, 0, [], {"trainer": 1})
    assert found == [("abort", f"{Path(file).name}: {line}")]


def test_an_exit_code_and_a_process_that_is_left_are_found(output: Path) -> None:
    found = judge(output.parent / "job", output, 1, ["7 python"], {"trainer": 1})
    assert [name for name, _ in found] == ["end", "end"]
