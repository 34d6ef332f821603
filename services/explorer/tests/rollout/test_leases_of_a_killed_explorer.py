"""The next process of a killed explorer returns its leases at once; a process that is alive keeps its own."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.fakes.data.experience import make_task
from trinity.data.experience import Task
from trinity.data.wire import task_to_proto
from trinity.explorer.rollout.leases import Leases
from trinity.explorer.rollout.task_queue import TaskQueue
from trinity.runtime.broker import Broker, Message, StreamSpec, connect, ensure_consumer, ensure_streams
from trinity.runtime.names import TASK_LEASE_SECONDS, TASKS_CONSUMER

pytestmark = pytest.mark.core

_TESTS = Path(__file__).parents[4] / "tests"


async def hold(url: str, folder: Path) -> None:
    """An explorer that works on each of its tasks until it is killed."""
    async with await connect(url, "killed") as broker:
        leases = Leases(folder, "explorer")
        await leases.take_over(broker)

        async def work(task: Task, message: Message) -> None:
            (folder / f"began-{task.ordinal}").touch()
            await asyncio.sleep(600)

        await TaskQueue(broker, "TASKS", 4, work, keep=leases.keep).run()


async def taken(broker: Broker, seconds: float) -> list[int]:
    """Tasks that another explorer gets within some seconds, or as soon as it has two."""
    found: list[int] = []

    async def work(task: Task, message: Message) -> None:
        found.append(task.ordinal)
        await message.ack()

    running = asyncio.create_task(TaskQueue(broker, "TASKS", 4, work).run())
    end = asyncio.get_running_loop().time() + seconds
    while len(found) < 2 and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.05)
    running.cancel()
    return sorted(found)


async def test_the_next_process_returns_them_at_once(nats_url: str, tmp_path: Path) -> None:
    async with await connect(nats_url, "test") as broker:
        await ensure_streams(broker, [StreamSpec("TASKS", ("t.>",))])
        await ensure_consumer(broker, "TASKS", TASKS_CONSUMER, lease_seconds=TASK_LEASE_SECONDS)
        for ordinal in (1, 2):
            await broker.publish("t.x", task_to_proto(make_task(ordinal)).SerializeToString(), message_id=str(ordinal))
        environment = {**os.environ, "PYTHONPATH": str(_TESTS)}
        with subprocess.Popen([sys.executable, __file__, nats_url, tmp_path], env=environment) as held:  # noqa: ASYNC220
            try:
                async with asyncio.timeout(60):
                    while len(list(tmp_path.glob("began-*"))) < 2:
                        await asyncio.sleep(0.05)
                await Leases(tmp_path, "explorer").take_over(broker)
                assert await taken(broker, 1.0) == [], "the process that holds them is alive"
            finally:
                held.kill()
        await Leases(tmp_path, "explorer").take_over(broker)
        assert await taken(broker, TASK_LEASE_SECONDS / 3) == [1, 2]
        assert (tmp_path / "leases-explorer.json").read_text() == "{}"


@pytest.mark.parametrize("left", ["", "[1]", '{"TASKS": 3}', "{"])
async def test_a_file_that_was_cut_off_is_passed_over(nats_url: str, tmp_path: Path, left: str) -> None:
    (tmp_path / "leases-explorer.json").write_text(left)
    async with await connect(nats_url, "test") as broker:
        await Leases(tmp_path, "explorer").take_over(broker)
    assert (tmp_path / "leases-explorer.json").read_text() == "{}"


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], Path(sys.argv[2])))
