"""A lease that an explorer gives back is no attempt; a task that kills its explorers still ends as a dead letter."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from support.fakes.data.experience import make_group, make_task
from support.fakes.explorers.dying_explorer import RUN
from support.programs.playing_explorer import Weights
from support.servers.nats import NatsServer
from trinity.buffer.state.streams import stream_specs
from trinity.data.experience import UNLIMITED, AttemptFailure, Experience, Group, Outcome, Task, TaskKind
from trinity.data.wire import task_to_proto
from trinity.explorer.journal.journal import Journals
from trinity.explorer.rollout import attempt, task_queue
from trinity.explorer.rollout.loop import Progress, RolloutLoop
from trinity.explorer.workflows import WORKFLOWS
from trinity.explorer.workflows.base import Workflow
from trinity.runtime.broker import Broker, connect, ensure_consumer, ensure_streams
from trinity.runtime.errors import FailureCause
from trinity.runtime.names import TASK_LEASE_SECONDS, TASKS_CONSUMER
from trinity.runtime.trust import nats_users
from trinity.runtime.trust.roles import Role

pytestmark = pytest.mark.core

NAME = "explorer"
RETURNS, DEATHS = 8, 6  # a task of one attempt is a dead letter after as many deaths
TRAINING = make_task(run=RUN.run, workflow="waits", max_attempts=1)
EVALUATION = replace(TRAINING, kind=TaskKind.EVALUATION)


class Waits(Workflow):
    """For a provider that is away, until it is there."""

    is_there = False

    async def run(self) -> list[Experience]:
        await asyncio.sleep(0 if Waits.is_there else 60)
        return list(make_group(self.task).experiences)


@pytest_asyncio.fixture
async def broker(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    """With what an explorer may do."""
    monkeypatch.setitem(WORKFLOWS, "waits", Waits)
    monkeypatch.setattr(Waits, "is_there", False)
    monkeypatch.setattr(task_queue, "_REQUEST_SECONDS", 0.2)  # that a drain waits for
    async with await connect(nats_server.url, "tests") as admin:
        await ensure_streams(admin, stream_specs(RUN, log_bytes=2**26, replicas=1))
        for stream in (RUN.tasks_stream, RUN.evaluation_tasks_stream):
            await ensure_consumer(admin, stream, TASKS_CONSUMER, lease_seconds=TASK_LEASE_SECONDS)
        for task in (TRAINING, EVALUATION):
            subject = RUN.task(task.taskset, 1) if task is TRAINING else RUN.evaluation_task(task.taskset)
            await admin.publish(subject, task_to_proto(task).SerializeToString(), message_id=subject)
    assert nats_server.users is not None
    creds = nats_users.user_file(nats_server.users, Role.EXPLORER, NAME, RUN.run)
    async with await connect(nats_server.url, NAME, creds=creds) as connected:
        yield connected


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("keeps", [True, False])
async def test_tasks_that_are_given_back_again_and_again_are_attempted(broker: Broker, keeps: bool) -> None:
    tools: Any = None
    journals = Journals(broker, RUN, NAME, UNLIMITED, lambda version: True, Weights().reaches_step, 0, keeps)
    explore = partial(attempt.explore, explorer_id=NAME, tools=tools, journals=journals)
    deliveries: dict[TaskKind, int] = {}

    async def delivered(task: Task, number: int, aside: Any) -> Outcome:
        deliveries[task.kind] = number
        return await explore(task, number)

    def started(progress: Progress) -> tuple[RolloutLoop, "asyncio.Task[None]"]:
        weights = Weights()
        loop = RolloutLoop(broker, RUN, 4, delivered, weights, weights.notify, progress, journals.give_back)
        return loop, asyncio.create_task(loop.run())

    for number in range(1, RETURNS + 1):
        loop, running = started(Progress())
        await until(lambda: [*deliveries.values()] == [number] * 2)  # noqa: B023
        assert await loop.drain(0.0) == (0, 2)
        running.cancel()

    Waits.is_there = True
    for task in (TRAINING, EVALUATION):
        assert isinstance(await explore(task, RETURNS + DEATHS), Group)
        lost = await explore(task, RETURNS + DEATHS + 1)
        assert isinstance(lost, AttemptFailure)
        assert (lost.cause, lost.final) == (FailureCause.LEASE_LOST, True)

    _, running = started(progress := Progress())
    await until(lambda: progress.groups_stored == 2)
    assert [*deliveries.values()] == [RETURNS + 1] * 2
    running.cancel()


async def test_tasks_of_the_same_number_in_both_queues_are_counted_apart(broker: Broker) -> None:
    tools: Any = None
    journals = Journals(broker, RUN, NAME, UNLIMITED, lambda version: True, Weights().reaches_step)
    for number in range(1, RETURNS + 1):
        await journals.give_back(TRAINING, number)
    lost = await attempt.explore(EVALUATION, RETURNS, NAME, tools, journals=journals)
    assert isinstance(lost, AttemptFailure) and lost.cause is FailureCause.LEASE_LOST
