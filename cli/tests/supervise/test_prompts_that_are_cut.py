"""A run says at once that prompts are longer than model.max_prompt_tokens: on the screen and in `trinity status`."""

import asyncio
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.cli.commands import status
from trinity.cli.supervise.stage.display import PlainDisplay, facts
from trinity.cli.supervise.stage.stage import Stage
from trinity.reading import status as reading_status
from trinity.reading import wire
from trinity.reading.client import Answers
from trinity.reading.ending import Ending

pytestmark = pytest.mark.core


def view(cut: int, stored: int, finished: bool = False) -> Answers:
    return Answers(pb.StatsResponse(stored=stored, fed=9, prompts_cut=cut, groups_per_step=4, finished=finished))


def test_the_screen_shows_them_when_the_first_comes(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay()
    for shown in (view(0, 1), view(0, 2), view(1, 3)):
        display._at -= 10  # as if the last line were older
        display.show(shown, "p/n")
    before, trouble = capsys.readouterr().out.splitlines()
    assert "prompts cut" not in before
    assert "prompts cut: 1 of 3 prompts are longer than model.max_prompt_tokens: they were cut" in trouble
    assert "prompts_cut" not in facts(view(0, 3))


def test_status_has_a_line_of_them() -> None:
    def lines(stats: pb.StatsResponse) -> list[str]:
        found: dict[str, Any] = {"job": None, "trainer_state": "", "explorers": [], "providers": [], "processes": []}
        made = reading_status._alarms(found, wire.counts(stats))
        return status._about_alarms({"alarms": [asdict(one) for one in made]})

    (line,) = lines(view(2, 3).buffer or pb.StatsResponse())
    assert line.startswith("2 of 3 prompts are longer than model.max_prompt_tokens")
    assert line.endswith("(raise model.max_prompt_tokens, or shorten the prompts)")
    assert lines(view(0, 3).buffer or pb.StatsResponse()) == []


class Screen:
    def __init__(self) -> None:
        self.said: list[str] = []

    def show(self, view: Answers, title: str, last_step: int = 0, starting: object = ()) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)


class Recorded:
    """Watches a run that answers with one view after another."""

    def __init__(self, *views: Answers) -> None:
        self._views = list(views)

    async def refresh(self) -> Answers:
        return self._views.pop(0)


@pytest.mark.parametrize(
    ("views", "warnings"),
    [
        ((view(3, 3), view(4, 4), view(5, 5), view(5, 5, finished=True)), 1),
        ((view(3, 3), view(3, 4), view(4, 9, finished=True)), 0),
        ((view(0, 0), view(0, 9, finished=True)), 0),
    ],
)
async def test_a_run_warns_once_where_every_prompt_of_the_first_batch_is_cut(
    views: tuple[Answers, ...], warnings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity.cli.supervise.stage.stage._POLL_SECONDS", 0)
    screen = Screen()
    plan: Any = SimpleNamespace(job_dir=None, config=SimpleNamespace(project="p", name="n", group=""))
    nothing: Any = None
    stage = Stage(nothing, plan, "", nothing, screen, 1)  # type: ignore[arg-type]
    watcher: Any = Recorded(*views)
    await asyncio.wait_for(stage._until_finished({}, watcher, Ending()), 10)
    assert len(screen.said) == warnings
    assert all(
        text.startswith("warning: all 4 prompts are longer than model.max_prompt_tokens") for text in screen.said
    )
