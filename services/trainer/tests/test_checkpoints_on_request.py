"""Who asks for a checkpoint hears of a new one, or at once of the newest if no step is without one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from trinity.api.trainer.v1 import trainer_pb2 as pb
from trinity.trainer.process.control import Control
from trinity.trainer.servicer import TrainerServicer

pytestmark = pytest.mark.core

JOB = Path("/job")


def asked(control: Control) -> "asyncio.Task[pb.CheckpointResponse]":
    context: Any = None
    return asyncio.create_task(TrainerServicer(control, "run", 1, JOB).Checkpoint(pb.CheckpointRequest(), context))


@pytest.mark.parametrize("state", ["waiting", "paused"])
@pytest.mark.parametrize(("step", "path"), [(3, str(JOB / "global_step_3")), (0, "")])
async def test_where_nothing_is_new_the_newest_is_the_answer(state: str, step: int, path: str) -> None:
    control = Control()
    control.update(state=state, step=step, checkpoint_step=step)
    answer = await asyncio.wait_for(asked(control), 10)
    assert (answer.step, answer.path) == (step, path)
    assert not control.take_checkpoint_request(), "nor is there a checkpoint after the next step"


@pytest.mark.parametrize("news", [{"checkpoint_step": 4}, {"state": "paused"}], ids=["a step", "none"])
async def test_within_a_step_it_waits_for_its_end(news: dict[str, Any]) -> None:
    control = Control()
    control.update(state="training", step=3, checkpoint_step=3)
    asking = asked(control)
    await asyncio.sleep(0.2)
    assert not asking.done()
    assert control.take_checkpoint_request()
    control.update(**news)
    assert (await asyncio.wait_for(asking, 10)).step == control.progress.checkpoint_step
