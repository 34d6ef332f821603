"""An explorer whose tasks all fail ends no run in which others store groups."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from trinity.buffer.ledger import failures
from trinity.buffer.ledger.failures import Failures, TasksFail

pytestmark = pytest.mark.core

CAUSE = "workflow"


def made(limit: int = 4) -> Failures:
    pipeline = SimpleNamespace(max_dropped_batches=0)
    config = SimpleNamespace(
        explorer=SimpleNamespace(max_dead_letters_in_a_row=limit),
        data_processor=SimpleNamespace(experience_pipeline=pipeline),
    )
    return Failures(cast(Any, SimpleNamespace(config=config, groups_per_step=1)))


def die(found: Failures, count: int, explorer: str, cause: str = CAUSE) -> None:
    for _ in range(count):
        found.dead(1, cause, explorer, "the grader is gone")


def test_one_of_several_explorers_is_named_and_the_run_continues() -> None:
    found = made()
    found.stored("good")
    with capture_logs() as logs:
        die(found, 9, "broken")
    told = [(line["event"], line["explorers"], line["advice"]) for line in logs]
    assert told == [("buffer.explorers.fail", ["broken"], "stop or revoke them; groups come from good")] * 2


def test_the_run_ends_once_the_others_fail_too() -> None:
    found = made()
    found.stored("good")
    die(found, 7, "broken")
    with pytest.raises(TasksFail, match=r"8 tasks in a row died of workflow .* on explorer good: the grader is gone"):
        die(found, 1, "good")


def test_the_run_ends_if_the_others_stored_their_last_group_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made()
    found.stored("left")
    monkeypatch.setattr(failures, "_RECENT_SECONDS", 0.0)
    die(found, 3, "broken")
    with pytest.raises(TasksFail):
        die(found, 1, "broken")


def test_a_single_explorer_ends_the_run_at_the_limit_though_it_stored_groups_before() -> None:
    found = made()
    found.stored("only")
    die(found, 3, "only")
    die(found, 3, "only", cause="environment")
    found.stored("only")
    die(found, 3, "only")
    with pytest.raises(TasksFail):
        die(found, 1, "only")
