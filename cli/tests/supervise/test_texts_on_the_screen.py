"""What a run's services say reaches the screen as it is: brackets are no markup, and end nothing."""

import pytest

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.cli.supervise.stage.display import LiveDisplay, PlainDisplay
from trinity.reading.client import Answers

pytestmark = pytest.mark.core

TEXT = "index [/oops] [red]x[/red] :smile:"


def test_brackets_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stats = pb.StatsResponse(
        fed=3, stored=1, groups_per_step=4, failure_causes={"workflow_error": 1}, last_failure=TEXT
    )
    with LiveDisplay() as display:
        display.show(Answers(stats), f"project/{TEXT}")
        display.say(f"the explorer said {TEXT}")
    shown = capsys.readouterr().out
    for text in (f"project/{TEXT}", f"the newest: {TEXT}", f"the explorer said {TEXT}"):
        assert text in shown


def test_a_line_without_facts_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    PlainDisplay().show(Answers(), "project/name")  # no service has answered yet
    assert capsys.readouterr().out == ""
