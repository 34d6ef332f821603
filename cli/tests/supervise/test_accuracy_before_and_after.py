"""summary.json has an accuracy before training only where one was measured before training."""

from collections.abc import Mapping

import pytest

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.cli.supervise.stage.display import facts
from trinity.cli.supervise.stage.stage import summarise
from trinity.reading.client import Answers

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("measured", "before", "after"),
    [
        ({0: 0.25, 20: 0.5, 40: 0.75}, 0.25, 0.75),
        ({6: 0.5}, None, 0.5),
        ({20: 0.5, 40: 0.75}, None, 0.75),
        ({}, None, None),
    ],
)
def test_it_is_that_of_step_0(measured: Mapping[int, float], before: float | None, after: float | None) -> None:
    stats = pb.StatsResponse(groups_per_step=4)
    for step, value in measured.items():
        stats.evaluations.add(step=step, taskset="t", metrics={"accuracy/mean@1": value})
    found = summarise("one", Answers(stats), None, None, 1, 1.0, {})
    assert (found["eval_before"], found["eval_after"]) == (before, after)


def test_the_screen_shows_the_share_of_replies_without_an_answer() -> None:
    def shown(**metrics: float) -> str:
        stats = pb.StatsResponse()
        stats.evaluations.add(step=2, taskset="t", metrics={f"{name}/mean@4": value for name, value in metrics.items()})
        return facts(Answers(stats))["accuracy"]

    assert shown(accuracy=0.25, answered=0.75) == "0.250 of t after step 2, 25% without an answer"
    assert shown(accuracy=0.25, answered=1.0) == shown(accuracy=0.25) == "0.250 of t after step 2"
