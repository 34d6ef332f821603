"""An explorer that cannot load the LIVE version returns the tasks that need it and leases no more of them."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from support.fakes.data.experience import make_task
from support.fakes.explorers.follower import Explorer
from trinity.data.experience import Task
from trinity.data.wire import task_to_proto
from trinity.explorer.rollout.loop import Progress, RolloutLoop
from trinity.explorer.rollout.task_queue import TaskQueue
from trinity.explorer.weights import choice, follower, loader
from trinity.explorer.weights.choice import Gates
from trinity.runtime.broker import StreamSpec, connect, ensure_consumer, ensure_streams
from trinity.runtime.errors import Unavailable
from trinity.runtime.names import TASK_LEASE_SECONDS, TASKS_CONSUMER, RunNames
from trinity.weights.manifest import Manifest

pytestmark = pytest.mark.core

_LONG_SECONDS = 3600.0


class Storage:
    """Of an explorer: the versions in `silent` cannot be fetched now."""

    def __init__(self, explorer: Explorer) -> None:
        self._cache: Any = explorer.cache
        self._fetch = self._cache.fetch
        self._cache.fetch = self.fetch
        self._cache.in_place = lambda _: None
        self.silent: set[int] = set()
        self.asked: list[int] = []

    def fetch(self, manifest: Manifest) -> Any:
        self.asked.append(manifest.version)
        if manifest.version in self.silent:
            raise Unavailable("s3: no answer")
        return self._fetch(manifest)


@pytest_asyncio.fixture
async def explorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Explorer]:
    monkeypatch.setattr(follower, "_RETRY_SECONDS", 0.2)
    monkeypatch.setattr(choice, "_OUT_OF_REACH_SECONDS", 0.0)
    made = Explorer(tmp_path)
    await made.start()
    yield made
    await made.stop()


async def reaches(weights: Gates, step: int) -> bool:
    return await asyncio.wait_for(weights.reaches_step(step), 10)


async def test_tasks_of_an_unreachable_version_go_to_other_explorers(explorer: Explorer) -> None:
    storage, weights = Storage(explorer), explorer.follower.gates
    storage.silent = {2}
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    of_the_next, of_a_later_one = (asyncio.create_task(weights.reaches_step(step)) for step in (2, 3))
    assert await reaches(weights, 1)
    await explorer.sync.show(explorer.version(2))
    assert await asyncio.wait_for(of_the_next, 10) is False
    assert not of_a_later_one.done(), "its version is not made yet"
    assert weights.falls_short
    assert await reaches(weights, 1), "what it serves is good for older tasks"
    storage.silent = set()
    await explorer.serves(2)
    assert not weights.falls_short
    assert await reaches(weights, 2)
    await explorer.sync.show(explorer.version(3))
    assert await asyncio.wait_for(of_a_later_one, 10)


async def test_it_leases_tasks_until_one_was_returned(explorer: Explorer) -> None:
    """Else its own older weights could not make the batches that the next version needs."""
    storage = Storage(explorer)
    storage.silent = {2}
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    await explorer.sync.show(explorer.version(2))
    await explorer.until(lambda: storage.asked.count(2) > 1)
    assert not explorer.follower.gates.falls_short


async def test_a_short_failure_returns_no_task(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_OUT_OF_REACH_SECONDS", _LONG_SECONDS)
    storage = Storage(explorer)
    storage.silent = {1}
    waiting = asyncio.create_task(explorer.follower.gates.reaches_step(1))
    await explorer.sync.show(explorer.version(1))
    await explorer.until(lambda: storage.asked.count(1) > 2)
    assert not waiting.done()
    storage.silent = set()
    assert await asyncio.wait_for(waiting, 10)


async def test_a_failure_says_whether_it_is_the_versions(explorer: Explorer) -> None:
    Storage(explorer).silent = {2}
    damaged = explorer.version(3)
    (explorer.folder / "v3" / "model.safetensors").write_bytes(b"short")
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    for manifest, is_passing in ((explorer.version(2), True), (damaged, False)):
        await explorer.sync.show(explorer.version(1), manifest)
        await explorer.until(lambda: explorer.sync.reports[-1].failed_version == manifest.version)  # noqa: B023
        assert explorer.sync.reports[-1].failure_is_passing is is_passing


async def test_a_fetch_that_hangs_counts_as_an_unreachable_store(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(loader, "_FETCH_SECONDS", 0.1)
    storage: Any = explorer.cache
    monkeypatch.setattr(storage, "fetch", lambda manifest: go_on.wait(60))
    await explorer.sync.show(explorer.version(1))
    try:
        await explorer.until(lambda: any("has not ended within" in r.failure for r in explorer.sync.reports))
        assert await reaches(explorer.follower.gates, 1) is False
    finally:
        go_on.set()


async def test_a_task_that_cannot_run_here_is_returned_to_the_queue() -> None:
    told: list[Any] = []

    async def retry(delay_seconds: float) -> None:
        told.append("retry")

    async def note_return(task: Task, deliveries: int) -> None:
        told.append((task.ordinal, deliveries))

    async def reaches_step(step: int) -> bool:
        return False

    weights: Any = SimpleNamespace(reaches_step=reaches_step)
    nothing: Any = None
    loop = RolloutLoop(nothing, RunNames("run"), 1, nothing, weights, nothing, Progress(), note_return)
    task = make_task(5, gate_step=7)
    message: Any = SimpleNamespace(data=task_to_proto(task).SerializeToString(), deliveries=3, retry=retry)
    await loop.work(task, message)
    assert told == [(5, 3), "retry"], "noted before another explorer may have it"


async def test_a_queue_that_pauses_leaves_its_tasks_to_others(nats_url: str) -> None:
    taken: dict[str, list[int]] = {"short": [], "other": []}
    is_short = True

    def queue(name: str) -> TaskQueue:
        async def work(task: Task, message: Any) -> None:
            taken[name].append(task.ordinal)
            await message.ack()

        return TaskQueue(broker, "TASKS", 4, work, lambda: name == "short" and is_short)

    async def until_taken(name: str, ordinal: int) -> None:
        async with asyncio.timeout(20):
            while ordinal not in taken[name]:
                await asyncio.sleep(0.02)

    async with await connect(nats_url, "test") as broker:
        await ensure_streams(broker, [StreamSpec("TASKS", ("t.>",))])
        await ensure_consumer(broker, "TASKS", TASKS_CONSUMER, lease_seconds=TASK_LEASE_SECONDS)
        for ordinal in (1, 2, 3):
            task = replace(make_task(ordinal), timeout_seconds=60.0)
            await broker.publish("t.x", task_to_proto(task).SerializeToString(), message_id=str(ordinal))
        short, other = queue("short"), queue("other")
        first = asyncio.create_task(short.run())
        async with asyncio.timeout(20):
            while short._no_open_request.is_set():  # until it would ask
                await asyncio.sleep(0.02)
        second = asyncio.create_task(other.run())
        await until_taken("other", 3)
        assert taken == {"short": [], "other": [1, 2, 3]}
        await other.drain(1.0)
        is_short = False
        await broker.publish("t.x", task_to_proto(make_task(4)).SerializeToString(), message_id="4")
        await until_taken("short", 4)
        first.cancel()
        second.cancel()
