"""Tasks that a step did not wait for are counted on the screen, in `trinity status` and in the summary."""

from typing import Any

import pytest

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.cli.commands import status
from trinity.cli.supervise.stage.display import facts
from trinity.cli.supervise.stage.stage import summarise
from trinity.reading import wire
from trinity.reading.client import Answers

pytestmark = pytest.mark.core


def view(cut: int, late: int = 0) -> Answers:
    return Answers(pb.StatsResponse(fed=9, stored=5, outstanding=3, cut_tasks=cut, late_groups=late, groups_per_step=4))


def test_the_screen_counts_them_where_there_are_any() -> None:
    assert facts(view(0))["groups"] == "5 stored, 3 out, 0 dead"
    assert facts(view(1))["groups"] == "5 stored, 3 out, 0 dead, 1 cut"


def test_status_has_a_line_of_them() -> None:
    def text(shown: Answers) -> str:
        assert shown.buffer is not None
        found: dict[str, Any] = {"job": "j", "run": "r", "stage": "s", "step": 1, "last_step": 2, "trainer_state": "t"}
        found |= {"waiting_for": "", "processes": [], "alarms": [], "weights": None, "explorers": []}
        return status.render(found | {"groups": wire.counts(shown.buffer)})

    assert "cut" not in text(view(0))
    assert "2 of 9 tasks were cut, as their step did not wait; groups of 1 came late" in text(view(2, 1))


def test_status_has_lines_of_machines_and_of_what_their_loss_cost() -> None:
    found: dict[str, Any] = {"job": "j", "run": "r", "stage": "s", "step": 1, "last_step": 2, "trainer_state": "t"}
    found |= {"waiting_for": "", "processes": [], "alarms": [], "weights": None, "explorers": [], "groups": None}
    found["nodes"] = [{"name": "gpu-1", "ranks": 4}, {"name": "gpu-2", "ranks": 2}]
    found["losses"] = [{"cause": "node gpu-2 is lost", "count": 2, "seconds": 41.4}]
    lines = status.render(found).splitlines()
    assert "the trainer has 2 machine(s): gpu-1 (4 rank(s)), gpu-2 (2 rank(s))" in lines
    assert "41 s lost, 2 time(s): node gpu-2 is lost" in lines


def test_the_summary_counts_them() -> None:
    assert summarise("one", view(2), None, None, 1, 1.0, {})["cut_tasks"] == 2
