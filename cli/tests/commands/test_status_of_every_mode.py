"""`trinity status` of what has no stage or no trainer: it shows no empty brackets and no None."""

from typing import Any

import pytest

from trinity.cli.commands import status

pytestmark = pytest.mark.core


def lines(**changes: Any) -> list[str]:
    found: dict[str, Any] = {"job": "/j", "run": "r", "stage": "", "mode": "both", "step": 1, "last_step": 2}
    found |= {"trainer_state": "training", "waiting_for": "", "processes": [], "alarms": [], "weights": None}
    shown = status.render(found | {"explorers": [], "groups": None} | changes)
    return [line for line in shown.splitlines() if line and not line.startswith("name ")]


def test_a_job_without_stages_has_no_brackets() -> None:
    assert lines() == ["/j", "step 1/2 (training)"]
    assert lines(stage="rft")[0] == "/j (rft)"


@pytest.mark.parametrize("mode", ["serve", "bench", "explore"])
def test_what_has_no_trainer_shows_its_mode_and_no_step(mode: str) -> None:
    assert lines(mode=mode, step=None, last_step=None, trainer_state=None) == [f"/j (mode {mode})"]
