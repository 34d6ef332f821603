"""Tasks that a caller gives to the run (PublishTasks): each is trained once, however often and late it is sent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from support.fakes.data.experience import make_group
from support.fakes.peers import FakeTrainer, a_failure, explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.buffer.state.streams import append_past_others
from trinity.config import load, make_plan
from trinity.data.experience import Outcome, Task, TaskKind
from trinity.data.task_source import TaskSource
from trinity.data.wire import task_to_proto
from trinity.runtime import names
from trinity.runtime.broker import SequenceConflict, StoredMessage, StreamSpec, connect, ensure_streams

pytestmark = pytest.mark.core

Started = Callable[..., "contextlib.AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]"]

STEPS, GROUPS = 6, 4
MINE = [f"mine/{i}" for i in range(6)]
OPERATORS = {"experience_pipeline": {"operators": [{"name": "reward_std_filter"}]}}


def request(run: BufferRun, task_ids: list[str]) -> pb.PublishTasksRequest:
    plan = make_plan(load(run.config_file))
    source = TaskSource.open(run.run, plan, plan.tasksets[0], TaskKind.TRAIN)
    tasks = [replace(source.train_task(i, 1, 0), task_id=task_id) for i, task_id in enumerate(task_ids)]
    return pb.PublishTasksRequest(run=run.run, tasks=map(task_to_proto, tasks))


async def give(run: BufferRun, trainer: FakeTrainer, task_ids: list[str] = MINE) -> int:
    call = trainer.buffer.PublishTasks(request(run, task_ids), timeout=30, wait_for_ready=True)
    return int((await call).stored)


class Case:
    def __init__(self, run: BufferRun, trainer: FakeTrainer, folder: Path) -> None:
        self.run, self.trainer, self._folder = run, trainer, folder
        self._step = 0

    async def train(self, until: int) -> None:
        while self._step < until:
            self._step += 1
            await self.trainer.batch(self._step)
            await self.trainer.publish(self._step, self._folder / f"weights/{self._step}")

    async def given(self) -> int:
        """Tasks of the caller's that were fed for the first two steps."""
        giving = asyncio.create_task(give(self.run, self.trainer))
        await asyncio.sleep(0.5)
        await self.trainer.begin()
        await self.train(2)
        return await giving

    async def trained(self) -> list[str]:
        entries = [await self.trainer.entry(step) for step in range(1, STEPS + 1)]
        return [group.task_id for entry in entries for group in entry.groups]


@pytest.fixture
async def case(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Case]:
    changes: dict[str, Any] = {"synchronizer": {"sync_interval": 1}, "data_processor": OPERATORS}
    run = BufferRun(tmp_path, nats_server, steps=STEPS, groups=GROUPS, **changes).start()
    trainer = run.trainer()
    try:
        yield Case(run, trainer, tmp_path)
    finally:
        await trainer.close()
        run.stop()


async def forget(case: Case) -> None:
    """As if NATS had known the ids for as long as it does: those of tasks two minutes, those of groups half an hour."""
    async with await connect(case.run.nats.url, "test") as broker:
        run_names = names.RunNames(case.run.run)
        for stream in (run_names.tasks_stream, run_names.experiences_stream):
            config = (await broker.js.stream_info(stream)).config
            await broker.js.update_stream(replace(config, duplicate_window=0.1))
        await asyncio.sleep(0.5)


async def test_a_call_that_is_repeated_stores_nothing_and_holds_up_no_step(case: Case) -> None:
    async with explorer(case.run.nats.url, case.run.run):
        assert await case.given() == len(MINE)
        assert await give(case.run, case.trainer) == 0
        await case.train(STEPS)
    trained = await case.trained()
    assert len(set(trained)) == len(trained)
    assert set(MINE) < set(trained)


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_id_that_nats_has_forgotten_is_known_all_the_same(restarted: bool, case: Case) -> None:
    """Also that of a task which is dead, and of one whose group an operator dropped."""

    def answer(task: Task, deliveries: int) -> Outcome:
        if task.task_id == MINE[1]:
            return a_failure(task, deliveries)
        group = make_group(task, version=task.gate_step, attempt=deliveries)
        if task.task_id != MINE[2]:
            return group
        return replace(group, experiences=tuple(replace(one, reward=1.0) for one in group.experiences))

    async with explorer(case.run.nats.url, case.run.run, answer):
        assert await case.given() == len(MINE)
        await case.train(3)
        commit = pb.CommitStepRequest(run=case.run.run, step=3, oldest_kept_step=3)
        await case.trainer.buffer.CommitStep(commit, timeout=20)  # ended tasks leave the queue
        if restarted:
            case.run.buffer.kill()
            await asyncio.to_thread(case.run.buffer.start)
        await forget(case)
        assert await give(case.run, case.trainer) == 0
        await case.train(STEPS)
    trained = await case.trained()
    assert len(set(trained)) == len(trained)
    assert {*MINE} - {*trained} == {MINE[1], MINE[2]}


async def test_a_task_that_two_calls_wait_to_give_is_fed_once(case: Case) -> None:
    calls = [asyncio.create_task(give(case.run, case.trainer, MINE[:2])) for _ in range(2)]
    await asyncio.sleep(0.5)
    await case.trainer.begin()
    assert sorted(await asyncio.gather(*calls)) == [0, 2]


async def test_tasks_whose_caller_is_gone_are_not_fed(case: Case) -> None:
    call = case.trainer.buffer.PublishTasks(request(case.run, MINE), timeout=30, wait_for_ready=True)
    await asyncio.sleep(0.5)
    call.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as full:  # nothing is fed before there are weights
        await case.trainer.buffer.PublishTasks(request(case.run, MINE[:1]), timeout=1.5)
    assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with explorer(case.run.nats.url, case.run.run):
        await case.trainer.begin()
        await case.train(2)
    entries = [await case.trainer.entry(step) for step in (1, 2)]
    assert not {group.task_id for entry in entries for group in entry.groups} & {*MINE}


async def test_an_id_of_the_runs_own_tasks_and_one_too_long_are_refused(case: Case) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await give(case.run, case.trainer, ["mine/0", "sums/0/7/7"])
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(refused.value.details()).startswith("tasks.task_id: is 'sums/0/7/7'; ")
    with pytest.raises(grpc.aio.AioRpcError, match=r"tasks\.task_id: has one of 1025 characters, 'xx.*; may have 1024"):
        await give(case.run, case.trainer, ["x" * 1025])


async def test_a_message_id_that_is_stored_is_judged_by_its_own_message(nats_url: str) -> None:
    """Whether the newest message is of another process says nothing of the one that has the id."""

    async def no(_: StoredMessage) -> bool:
        return False

    async def is_same(message: StoredMessage) -> bool:
        return message.data == b"one"

    async with await connect(nats_url, "test") as broker:
        await ensure_streams(broker, [StreamSpec("S", ("s",))])

        async def append(data: bytes, name: str, last: int) -> int:
            about: dict[str, Any] = {"message_id": name, "last_sequence": last, "is_ours": no, "is_same": is_same}
            return await append_past_others(broker, "s", "S", lambda _: data, **about)

        assert await append(b"one", "1", 0) == 1
        assert await append(b"two", "2", 1) == 2
        with pytest.raises(SequenceConflict) as known:
            await append(b"one", "1", 2)
        assert known.value.stored_at == 1
        assert await append(b"other", "2", 2) == 3, "another process took this id"
