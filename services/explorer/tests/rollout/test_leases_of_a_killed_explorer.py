"""The next process of a killed explorer returns its leases at once; a process that is alive keeps its own."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.fakes.data.experience import make_task
from trinity.data.experience import Task
from trinity.data.wire import task_to_proto
from trinity.explorer.rollout.leases import Leases
from trinity.explorer.rollout.task_queue import TaskQueue
from trinity.explorer.types import EngineFailed
from trinity.runtime.broker import Broker, Message, StreamSpec, connect, ensure_consumer, ensure_streams, return_leases
from trinity.runtime.names import TASK_LEASE_SECONDS, TASKS_CONSUMER

pytestmark = pytest.mark.core

_TESTS = Path(__file__).parents[4] / "tests"


async def hold(url: str, folder: Path) -> None:
    """An explorer that works on each of its tasks until it is killed."""
    leases = Leases(folder, "explorer")
    assert leases.take_over() == []
    async with await connect(url, "killed") as broker:

        async def work(task: Task, message: Message) -> None:
            (folder / f"began-{task.ordinal}").touch()
            await asyncio.sleep(600)

        await TaskQueue(broker, "TASKS", 4, work, keep=leases.keep).run()


@pytest_asyncio.fixture
async def broker(nats_url: str) -> AsyncIterator[Broker]:
    async with await connect(nats_url, "test") as connected:
        await ensure_streams(connected, [StreamSpec("TASKS", ("t.>",))])
        await ensure_consumer(connected, "TASKS", TASKS_CONSUMER, lease_seconds=TASK_LEASE_SECONDS)
        for ordinal in (1, 2):
            data = task_to_proto(make_task(ordinal)).SerializeToString()
            await connected.publish("t.x", data, message_id=str(ordinal))
        yield connected


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


async def test_the_next_process_returns_them_at_once(broker: Broker, nats_url: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(_TESTS)}
    with subprocess.Popen([sys.executable, __file__, nats_url, tmp_path], env=environment) as held:  # noqa: ASYNC220
        try:
            async with asyncio.timeout(60):
                while len(list(tmp_path.glob("began-*"))) < 2:
                    await asyncio.sleep(0.05)
            assert Leases(tmp_path, "explorer").take_over() == [], "the process that holds them is alive"
        finally:
            held.kill()
    left = Leases(tmp_path, "explorer").take_over()
    assert len(left) == 2
    await return_leases(broker, left)
    assert await taken(broker, TASK_LEASE_SECONDS / 3) == [1, 2]


async def test_tasks_that_fail_with_their_engine_are_left_to_the_next_process(broker: Broker, tmp_path: Path) -> None:
    async def work(task: Task, message: Message) -> None:
        if task.ordinal == 2:
            raise EngineFailed("the core is gone")
        await asyncio.sleep(600)

    leases = Leases(tmp_path, "explorer")
    leases.take_over()
    with pytest.raises(EngineFailed):
        await TaskQueue(broker, "TASKS", 4, work, keep=leases.keep).run()
    await asyncio.sleep(0)  # the other task ends, cancelled
    left = json.loads((tmp_path / "leases-explorer.json").read_text())["TASKS"]
    await return_leases(broker, left)
    assert await taken(broker, TASK_LEASE_SECONDS / 3) == [1, 2]


async def test_an_old_file_takes_nothing_from_those_who_hold_the_tasks_now(tmp_path: Path) -> None:
    file = tmp_path / "leases-explorer.json"
    file.write_text('{"TASKS": ["$JS.ACK.TASKS.explorers.1.1.1.1.0"]}')
    os.utime(file, (0, time.time() - TASK_LEASE_SECONDS - 1))
    assert Leases(tmp_path, "explorer").take_over() == []


@pytest.mark.parametrize("left", ["", "[1]", '{"TASKS": 3}', "{"])
def test_a_damaged_file_is_passed_over(tmp_path: Path, left: str) -> None:
    (tmp_path / "leases-explorer.json").write_text(left)
    assert Leases(tmp_path, "explorer").take_over() == []
    assert (tmp_path / "leases-explorer.json").read_text() == "{}"


@pytest.mark.parametrize("lease", ["x y", ""])
async def test_a_lease_that_names_none_is_passed_over(broker: Broker, lease: str) -> None:
    await return_leases(broker, [lease])


def test_without_a_folder_that_can_be_written_there_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "leases-explorer.lock").mkdir()
    leases = Leases(tmp_path, "explorer")
    assert leases.take_over() == []
    leases.keep("TASKS", ["$JS.ACK.TASKS.explorers.1.1.1.1.0"])
    assert not (tmp_path / "leases-explorer.json").exists()


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], Path(sys.argv[2])))
