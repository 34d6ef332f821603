"""Tasks that a joining explorer brings, on a real buffer that is killed: one ledger, and each task once."""

import asyncio
import json
from pathlib import Path

import grpc
import grpc.aio
import pytest

from support.fakes.peers import explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.config import load, make_plan
from trinity.config.schema.buffer import TasksetConfig
from trinity.data.experience import Task, TaskKind
from trinity.data.task_source import TaskSource
from trinity.data.wire import task_to_proto
from trinity.modes.client import publish_joined
from trinity.reading.errors import RunError
from trinity.runtime.errors import Unavailable

pytestmark = pytest.mark.core

NAME = "new-own"
ROWS, STEPS, GROUPS = 50, 10, 4


def own_tasks(run: BufferRun) -> list[Task]:
    file = run.folder / "own.jsonl"
    file.write_text("".join(json.dumps({"question": f"own {i}", "answer": "1"}) + "\n" for i in range(ROWS)))
    plan = make_plan(load(run.config_file))
    taskset = TasksetConfig(name=NAME, path=str(file))
    source = TaskSource.open(run.run, plan, taskset, TaskKind.TRAIN)
    return [source.train_task(position, 1, 0) for position in range(ROWS)]


@pytest.mark.slow
async def test_its_groups_are_in_the_ledger_and_counts_add_up(tmp_path: Path, nats_server: NatsServer) -> None:
    changes = {"synchronizer": {"sync_interval": 1, "sync_offset": 1}}
    run = BufferRun(tmp_path, nats_server, steps=STEPS, groups=GROUPS, **changes).start()
    trainer, tasks = run.trainer(), own_tasks(run)

    async def offer(first: int, count: int, seconds: float = 3.0) -> int:
        part = tasks[first : first + count]
        return await publish_joined(run.buffer.address, run.run, NAME, float(ROWS), first, part, seconds)

    async def bring() -> None:
        """As the joining explorer does it."""
        while True:
            try:
                position = await offer(0, 0)
                await offer(position, 5)
            except Unavailable:
                await asyncio.sleep(0.05)

    try:
        await trainer.begin()
        async with explorer(nats_server.url, run.run):
            bringing = asyncio.create_task(bring())
            for step in range(1, STEPS + 1):
                await trainer.batch(step)
                if step == 4:  # the buffer dies, with tasks of both out
                    run.buffer.kill()
                    await asyncio.to_thread(run.buffer.start)
                if step == 7:  # the new explorer dies
                    bringing.cancel()
                await trainer.publish(step, tmp_path / f"weights/{step}")
        entries = [await trainer.entry(step) for step in range(1, STEPS + 1)]
        ids = [group.task_id for entry in entries for group in entry.groups]
        assert len(ids) == len(set(ids)) == STEPS * GROUPS
        own = [task_id for task_id in ids if task_id.startswith(f"{NAME}/")]
        assert 5 <= len(own) < STEPS * GROUPS
        assert set(own) == {task.task_id for task in tasks[: len(own)]}, "each once, in order, none left out"
        assert max(group.staleness_steps for entry in entries for group in entry.groups) <= 1
        stats = await trainer.buffer.Stats(pb.StatsRequest(run=run.run), timeout=30)
        assert (stats.fed, stats.stored, stats.dead_letters, stats.outstanding) == (40, 40, 0, 0)
        assert await offer(0, 0) == len(own)
    finally:
        await trainer.close()
        run.stop()


async def test_what_cannot_join_is_refused_in_a_sentence(tmp_path: Path, nats_server: NatsServer) -> None:
    run = BufferRun(tmp_path, nats_server, synchronizer={"sync_interval": 1}).start()
    try:
        with pytest.raises(RunError, match=r"joined: the run is synchronous .* set synchronizer.sync_offset"):
            await publish_joined(run.buffer.address, run.run, NAME, 1.0, 0, own_tasks(run)[:2], 3.0)
    finally:
        run.stop()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": "sums"}, "joined.name: 'sums' is a taskset of the run"),
        ({"name": "a b"}, "joined.name: must be"),
        ({"weight": 0.0}, "joined.weight: is 0.0"),
        ({"weight": float("nan")}, "joined.weight: is nan"),
        ({"name": "other", "tasks": True}, "tasks.task_id: is 'new-own/0/0/0', must begin with 'other/'"),
        ({"first_position": 3}, "joined.first_position: is 3, must be in"),
        ({"tasks": "x" * 9_000_000}, "tasks: have one of 90"),
    ],
)
async def test_fields_are_checked(
    fields: dict[str, object], problem: str, tmp_path: Path, nats_server: NatsServer
) -> None:
    run = BufferRun(tmp_path, nats_server).start()
    given = {"name": NAME, "weight": 1.0, "first_position": 0, **fields}
    trainer = run.trainer()
    try:
        joined = pb.JoinedTaskset(**{name: value for name, value in given.items() if name != "tasks"})  # type: ignore
        tasks = [task_to_proto(task) for task in own_tasks(run)[:1]] if "tasks" in fields else []
        for task in tasks if fields.get("tasks") is not True else ():
            task.row_json = str(fields["tasks"])
        request = pb.PublishTasksRequest(run=run.run, joined=joined, tasks=tasks)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await trainer.buffer.PublishTasks(request, timeout=10, wait_for_ready=True)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(refused.value.details()).startswith(problem)
    finally:
        await trainer.close()
        run.stop()
