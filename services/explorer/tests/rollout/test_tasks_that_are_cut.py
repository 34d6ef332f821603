"""A task that is gone from the queue: its attempt ends and counts as cut. One that is there runs on."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from support.fakes.data.experience import make_group, make_task
from trinity.data.experience import Outcome, Task, TaskKind
from trinity.explorer.rollout import loop as loop_module
from trinity.explorer.rollout import task_queue
from trinity.explorer.rollout.attempt import Receipt
from trinity.explorer.rollout.loop import Progress, RolloutLoop
from trinity.explorer.rollout.task_queue import TaskEnded, while_queued
from trinity.runtime.broker import StoredMessage
from trinity.runtime.errors import NotFound, PermissionDenied, Unavailable
from trinity.runtime.names import RunNames

pytestmark = pytest.mark.core

THERE = StoredMessage(7, "t", b"", {})


class Queue:
    """Answers of the broker, the last one again and again."""

    def __init__(self, *answers: Exception | StoredMessage) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def get(self, stream: str, sequence: int) -> StoredMessage:
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_queue, "_LOOK_SECONDS", 0.01)


def queue(*answers: Exception | StoredMessage) -> Any:
    return Queue(*answers)


async def test_what_is_gone_ends_the_body() -> None:
    with pytest.raises(TaskEnded):
        async with asyncio.timeout(10), while_queued(queue(THERE, NotFound("gone")), "s", 7):
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    "answers",
    [
        (THERE,),
        (NotFound("a replica that is behind"), THERE, NotFound("again"), THERE),
        (Unavailable("no leader"),),
        (PermissionDenied("of an identity of an earlier release"),),
    ],
    ids=["there", "a replica that is behind", "no answer", "no right"],
)
async def test_what_is_there_or_not_known_to_be_gone_runs_on(answers: tuple[Any, ...]) -> None:
    asked = queue(*answers)
    async with while_queued(asked, "s", 7):
        await asyncio.sleep(0.2)
    assert asked.asked == 1 if isinstance(answers[0], PermissionDenied) else asked.asked > 4


async def test_a_large_task_is_looked_for_less_often() -> None:
    asked = queue(StoredMessage(7, "t", bytes(1024 * 1024), {}))
    async with while_queued(asked, "s", 7):
        await asyncio.sleep(0.2)
    assert asked.asked == 1


async def test_a_time_limit_of_the_body_and_a_cancelled_body_are_none_of_the_queue() -> None:
    with pytest.raises(TimeoutError):
        async with while_queued(queue(THERE), "s", 7), asyncio.timeout(0.05):
            await asyncio.sleep(5)

    async def body() -> None:
        async with while_queued(queue(THERE), "s", 7):
            await asyncio.sleep(5)

    running = asyncio.create_task(body())
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def worked(monkeypatch: pytest.MonkeyPatch, task: Task) -> tuple[Progress, list[str]]:
    """A loop after its work on a task that is gone from the queue, and what it told NATS."""
    told: list[str] = []

    async def ack() -> None:
        told.append("ack")

    async def retry(delay_seconds: float) -> None:
        told.append("retry")

    async def explore(task: Task, deliveries: int, **_: Any) -> Outcome:
        await asyncio.sleep(0.3)
        return make_group(task)

    async def store(*_: Any) -> Receipt:
        return Receipt(1, 0, False)

    async def nothing(*_: Any) -> bool:
        return True

    monkeypatch.setattr(loop_module, "store", store)
    weights: Any = SimpleNamespace(reaches_step=nothing, notify=nothing)
    progress = Progress()
    loop = RolloutLoop(queue(NotFound("gone")), RunNames("run"), 1, explore, weights, weights.notify, progress)
    message: Any = SimpleNamespace(sequence=7, deliveries=1, headers={}, ack=ack, retry=retry)
    await asyncio.wait_for(loop.work(task, message), 10)
    return progress, told


async def test_an_attempt_at_a_cut_task_is_charged_as_cut_and_its_lease_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress, told = await worked(monkeypatch, make_task())
    assert set(progress.account.seconds) == {"cut"}
    assert told == ["retry"]
    assert (progress.running_tasks, progress.groups_stored, progress.failed_attempts) == (0, 0, 0)


async def test_evaluations_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, told = await worked(monkeypatch, make_task(kind=TaskKind.EVALUATION))
    assert set(progress.account.seconds) == {"evaluated"}
    assert (told, progress.groups_stored) == (["ack"], 1)
