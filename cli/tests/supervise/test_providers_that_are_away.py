"""A run says at once, on its screen, that its explorers wait for a provider."""

import pytest

from trinity.api.explorer.v1 import explorer_pb2
from trinity.api.sync.v1 import sync_pb2
from trinity.cli.supervise.stage.display import PlainDisplay
from trinity.reading.client import Answers

pytestmark = pytest.mark.core


def view(*states: str) -> Answers:
    numbers = [explorer_pb2.ExplorerState.Value(f"EXPLORER_STATE_{state}") for state in states]
    return Answers(members=[sync_pb2.Member(explorer_id=f"e{n}", state=state) for n, state in enumerate(numbers)])


def test_the_screen_says_which_explorers_wait(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay()
    for shown in (view("RUNNING", "RUNNING"), view("RUNNING", "WAITING_FOR_PROVIDER"), view("RUNNING", "RUNNING")):
        display._at -= 10  # as if the last line were older
        display.show(shown, "p/n")
    before, away, *after = capsys.readouterr().out.splitlines()
    assert "provider away: tasks of e1 wait for it; `trinity env list` names it" in away
    assert "provider away" not in before + "".join(after)


def test_the_screen_says_which_explorers_wait_for_room_at_nats(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay()
    for shown in (view("RUNNING"), view("WAITING_FOR_LOG"), view("RUNNING")):
        display._at -= 10
        display.show(shown, "p/n")
    before, full, *after = capsys.readouterr().out.splitlines()
    assert "no room: NATS takes no groups of e0; `trinity log` has its reason" in full
    assert "no room" not in before + "".join(after)
