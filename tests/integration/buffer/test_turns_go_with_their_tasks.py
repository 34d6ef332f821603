"""The buffer removes the turns of tasks that have ended, whatever the order, and leaves those of others."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from support.fakes.peers import FakeTrainer, a_group, explorer
from support.servers.buffer_run import BufferRun
from trinity.data.experience import Outcome, Task
from trinity.runtime.broker import connect
from trinity.runtime.names import RunNames

pytestmark = pytest.mark.core

Started = Callable[..., AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]]
OPEN = 2  # the task that does not end, by ordinal


async def test_turns_stay_until_their_task_has_ended(started: Started) -> None:
    def answer(task: Task, deliveries: int) -> Outcome | None:
        return None if task.ordinal == OPEN else a_group(task, deliveries)

    async with started(steps=2, groups=4) as (run, trainer), await connect(run.nats.url, "tests") as broker:
        names = RunNames(run.run)

        async def left() -> set[int]:
            return {names.turn_of(subject)[0] for subject in await broker.subjects(names.turns_stream)}

        async def until(wanted: set[int]) -> None:
            async with asyncio.timeout(30):
                while await left() != wanted:
                    await asyncio.sleep(0.1)

        for ordinal in range(1, 5):
            for attempt in (1, 2):
                await broker.publish(names.turn(ordinal, attempt, "a"), b"turn", message_id=f"{ordinal}/{attempt}")
        assert await left() == {1, 2, 3, 4}
        async with explorer(run.nats.url, run.run, answer):
            await until({OPEN})
            # A process whose lease ended writes once more.
            await broker.publish(names.turn(1, 1, "a"), b"turn", message_id="late")
            await until({OPEN})
            stats = await trainer.stats()
            assert stats.outstanding >= 1


@pytest.mark.parametrize("ordinal", ["9" * 5000, "9" * 20, "-1", "01", "x", "²"])
def test_no_number_in_a_forged_subject_ends_the_buffer(ordinal: str) -> None:
    """An explorer chooses the numbers in its subjects. Python reads no number of more than 4,300 digits."""
    run = RunNames("r")
    assert run.turn_of(run.turn(7, 2, "a")) == (7, 2, "a")
    assert run.turn_of(run.turn(2**62 + 7, 2, "a")) == (2**62 + 7, 2, "a"), "of an evaluation"
    assert run.turn_of(f"trinity.r.turns.{ordinal}.1.a") == run.turn_of(f"trinity.r.turns.1.{ordinal}.a") == (0, 0, "")
