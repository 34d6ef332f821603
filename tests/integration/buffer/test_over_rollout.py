"""explorer.over_rollout: a step goes without its slowest tasks, and the ledger says which; also where the buffer dies.

The buffer, sync and NATS are real processes; explorers are the real loop without an engine, or hand-written.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from support.fakes.data.experience import make_group
from support.fakes.peers import FakeTrainer
from support.servers.buffer_run import BufferRun
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.buffer.ledger.wire import Entry
from trinity.buffer.run import Run
from trinity.buffer.settings import BufferSettings
from trinity.buffer.state.context import RunContext
from trinity.config import load, make_plan
from trinity.data.experience import AttemptFailure, Outcome, Task
from trinity.explorer.rollout import task_queue
from trinity.explorer.rollout.loop import Progress, RolloutLoop
from trinity.runtime import headers, names
from trinity.runtime.broker import Broker, Bucket, connect
from trinity.runtime.errors import FailureCause, NotFound

pytestmark = pytest.mark.core

Started = Callable[..., "contextlib.AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]"]
GROUPS = 4


def over_rollout(ratio: float = 0.5, wait: float = 0.5) -> dict[str, Any]:
    return {"explorer": {"over_rollout": {"ratio": ratio, "wait_after_min": wait}}, "groups": GROUPS}


class Weights:
    falls_short = False

    async def reaches_step(self, step: int) -> bool:
        return True

    async def notify(self) -> None:
        pass


class Explorer:
    """The explorer's loop. Tasks of the ordinals in `slow` take until `finish`; `ended` is how others of them ended."""

    def __init__(self, slow: set[int]) -> None:
        self.slow, self.finish = slow, asyncio.Event()
        self.running: set[int] = set()
        self.abandoned: list[int] = []
        self.progress = Progress()

    async def explore(self, task: Task, deliveries: int, **_: Any) -> Outcome:
        if task.ordinal in self.slow:
            self.running.add(task.ordinal)
            try:
                await self.finish.wait()
            except asyncio.CancelledError:
                self.abandoned.append(task.ordinal)
                raise
        return make_group(task, attempt=deliveries)


@contextlib.asynccontextmanager
async def looping(run: BufferRun, explore: Callable[..., Any], progress: Progress) -> AsyncIterator[Broker]:
    async with await connect(run.nats.url, "tester") as broker:
        weights = Weights()
        loop = RolloutLoop(broker, names.RunNames(run.run), 16, explore, weights, weights.notify, progress)
        running = asyncio.create_task(loop.run())
        try:
            yield broker
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def exploring(run: BufferRun, slow: set[int]) -> AsyncIterator[tuple[Explorer, Broker]]:
    explorer = Explorer(slow)
    async with looping(run, explorer.explore, explorer.progress) as broker:
        yield explorer, broker


async def until(holds: Callable[[pb.StatsResponse], bool], trainer: FakeTrainer) -> pb.StatsResponse:
    async with asyncio.timeout(30):
        while not holds(stats := await trainer.stats()):
            await asyncio.sleep(0.05)
    return stats


def adds_up(stats: pb.StatsResponse) -> bool:
    return bool(stats.fed == stats.stored + stats.dead_letters + stats.cut_tasks + stats.outstanding)


async def queued(broker: Broker, run: BufferRun) -> set[int]:
    """Ordinals whose task is in the queue."""
    found, run_names = set(), names.RunNames(run.run)
    for ordinal in range(1, (await broker.state(run_names.tasks_stream)).last_sequence + 1):
        with contextlib.suppress(NotFound):
            await broker.last(run_names.tasks_stream, run_names.task("sums", ordinal))
            found.add(ordinal)
    return found


async def test_a_step_goes_without_its_slowest_tasks_and_they_end(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_queue, "_LOOK_SECONDS", 0.2)
    async with started(steps=3, **over_rollout()) as (run, trainer), exploring(run, {2, 3}) as (explorer, broker):
        batches = [await trainer.batch(step) for step in (1, 2, 3)]
        entries = [await trainer.entry(step) for step in (1, 2, 3)]
        assert [[group.ordinal for group in entry.groups] for entry in entries] == [
            [1, 4], [5, 6, 7, 8], [9, 10, 11, 12],
        ]  # fmt: skip
        tasks = [task.task_id for task in entries[0].groups]
        assert [task.ordinal for task in entries[0].cut] == [2, 3]
        assert all(task.task_id.startswith("sums/0/") and task.task_id not in tasks for task in entries[0].cut)
        assert not any(entry.partial for entry in entries)
        assert not entries[1].cut and not entries[2].cut
        async with asyncio.timeout(20):
            while sorted(explorer.abandoned) != [2, 3]:
                await asyncio.sleep(0.05)
        stats = await until(lambda stats: stats.outstanding == 0, trainer)
        assert (stats.fed, stats.stored, stats.cut_tasks, stats.late_groups) == (12, 10, 2, 0)
        assert not {2, 3} & await queued(broker, run)
        async with asyncio.timeout(20):  # their leases are returned
            while (await broker.consumer(names.RunNames(run.run).tasks_stream, names.TASKS_CONSUMER)).leased:
                await asyncio.sleep(0.1)
        assert set(explorer.progress.account.seconds) == {"stored", "cut"}
        said = [event for event in run.buffer.events() if event["event"] == "buffer.ledger.written"]
        assert [len(event["cut"]) for event in said] == [2, 0, 0]
        run.buffer.kill()
        run.buffer.start()
        assert [await trainer.batch(step) for step in (1, 2, 3)] == batches
        assert adds_up(again := await trainer.stats())
        assert (again.stored, again.cut_tasks) == (10, 2)


async def test_a_group_that_comes_late_is_dropped_with_its_cause_and_trained_by_no_step(started: Started) -> None:
    async with started(steps=3, **over_rollout()) as (run, trainer), exploring(run, {2}) as (explorer, _):
        await trainer.batch(1)
        explorer.finish.set()
        stats = await until(lambda stats: stats.late_groups == 1, trainer)
        assert adds_up(stats)
        assert (stats.cut_tasks, stats.duplicates_dropped, dict(stats.dropped)) == (1, 0, {})
        run.buffer.kill()  # the fact is not lost with the process that read it
        run.buffer.start()
        await trainer.batch(3)
        entries = [await trainer.entry(step) for step in (1, 2, 3)]
    assert [[task.ordinal for task in entry.cut] for entry in entries] == [[2], [], []]
    drops = [(drop.ordinal, drop.reason, drop.num_response_tokens) for entry in entries for drop in entry.dropped]
    assert drops in ([], [(2, "cut", 4 * 12)]), "none where all entries were written before it came"
    assert [group.ordinal for entry in entries for group in entry.groups] == [1, *range(3, 13)]


async def test_a_step_has_the_groups_that_come_while_it_waits(started: Started) -> None:
    async with started(steps=2, **over_rollout(wait=3.0)) as (run, trainer), exploring(run, {2, 3}) as (explorer, _):
        asking = asyncio.create_task(trainer.batch(1))
        await until(lambda stats: stats.stored >= 2, trainer)
        assert "2 are enough after 3 s more" in (await trainer.stats()).waiting_for
        explorer.slow = {2}
        explorer.finish.set()
        await asking
        entry = await trainer.entry(1)
    assert ([group.ordinal for group in entry.groups], list(entry.cut)) == ([1, 2, 3, 4], [])


async def test_a_step_waits_for_its_fewest_groups(started: Started) -> None:
    async with started(steps=1, **over_rollout(0.25, 0.0)) as (run, trainer), exploring(run, {1, 2}) as (explorer, _):
        with pytest.raises(TimeoutError):
            await trainer.batch(1, seconds=2)
        explorer.slow = {1}
        explorer.finish.set()
        await trainer.batch(1)
        entry = await trainer.entry(1)
        assert len(entry.groups) >= 3
        assert len(entry.groups) + len(entry.cut) == GROUPS
        assert adds_up(await trainer.stats())


class Died(Exception):
    """Stands for a kill -9."""


@pytest.mark.parametrize("written", [False, True])
async def test_a_buffer_that_dies_around_the_entry_cuts_once(
    written: bool, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the entry is there, nothing has ended: the task is in the queue, and its group is trained. After it, the
    task is cut, and a group that comes is late."""
    async with started(steps=3, **over_rollout(wait=0.0)) as (run, trainer), exploring(run, {2}) as (explorer, broker):
        await until(lambda stats: stats.fed == 12, trainer)
        await until(lambda stats: stats.stored >= 3, trainer)
        run.buffer.kill()
        context = RunContext(broker, names.RunNames(run.run), make_plan(load(run.config_file)))
        versions = await Bucket.open(broker, names.VERSIONS_BUCKET)
        dying = Run(context, versions, await Bucket.open(broker, names.RUNS_BUCKET), BufferSettings())
        await dying.open()
        assert dying.writer is not None and dying.feeder is not None
        append = dying.ledger.append

        async def append_and_die(entry: Entry) -> None:
            assert [task.ordinal for task in entry.cut] == [2]
            if written:
                await append(entry)
            assert not dying.writer.window.has_ended(2)  # type: ignore[union-attr]
            raise Died

        monkeypatch.setattr(dying.ledger, "append", append_and_die)
        with pytest.raises(ExceptionGroup) as died:
            async with context.wanted(1):
                await asyncio.wait_for(asyncio.create_task(dying.run()), 30)
        assert died.value.subgroup(Died)
        assert 2 in await queued(broker, run), "it leaves the queue after the entry is there"

        run.buffer.start()
        if not written:
            assert (await trainer.stats()).cut_tasks == 0
            explorer.finish.set()
            await until(lambda stats: stats.stored >= 12, trainer)
        batches = [await trainer.batch(step) for step in (1, 2, 3)]
        entry = await trainer.entry(1)
        if written:
            assert ([group.ordinal for group in entry.groups], [t.ordinal for t in entry.cut]) == ([1, 3, 4], [2])
            async with asyncio.timeout(20):
                while 2 in await queued(broker, run):
                    await asyncio.sleep(0.05)
            explorer.finish.set()
        else:
            assert ([group.ordinal for group in entry.groups], list(entry.cut)) == ([1, 2, 3, 4], [])
        stats = await until(lambda stats: stats.outstanding == 0, trainer)
        assert (stats.fed, stats.stored, stats.cut_tasks) == (12, 12 - written, int(written))
        assert [await trainer.batch(step) for step in (1, 2, 3)] == batches


async def test_counts_add_up_however_often_the_buffer_is_killed(started: Started) -> None:
    """Some tasks are slow, some come late, some die; each ends in one place, and no step ever changes."""
    steps, rng = 10, random.Random(5)
    slowest, formed = 17, asyncio.Event()

    async def explore(task: Task, deliveries: int, **_: Any) -> Outcome:
        await asyncio.sleep(random.Random(task.ordinal).choice((0.0, 0.0, 0.2, 6.0)))
        if task.ordinal == slowest:
            await formed.wait()
        if task.ordinal % 7 == 0:
            return AttemptFailure(task, deliveries, "tester", FailureCause.WORKFLOW_ERROR, "it fails", True, 1.0)
        return make_group(task, attempt=deliveries)

    async def kill(run: BufferRun) -> None:
        for _ in range(5):
            await asyncio.sleep(rng.uniform(0.3, 1.2))
            run.buffer.kill()
            await asyncio.to_thread(run.buffer.start)

    changes = {**over_rollout(wait=0.1), "steps": steps}
    async with started(**changes) as (run, trainer), looping(run, explore, Progress()) as broker:
        killing = asyncio.create_task(kill(run))
        batches = []
        for step in range(1, steps + 1):
            batches.append(await trainer.batch(step))
            await asyncio.sleep(0.2)
        formed.set()
        await killing
        stats = await until(lambda stats: stats.outstanding == 0, trainer)
        entries = [await trainer.entry(step) for step in range(1, steps + 1)]
        assert [await trainer.batch(step) for step in range(1, steps + 1)] == batches
        names_of = names.RunNames(run.run)
        stored = [await broker.get(names_of.experiences_stream, g.log_sequence) for e in entries for g in e.groups]
    used = [group.ordinal for entry in entries for group in entry.groups]
    cut = [task.ordinal for entry in entries for task in entry.cut]
    dead = [ordinal for ordinal in range(1, stats.fed + 1) if ordinal % 7 == 0 and ordinal not in cut]
    assert sorted([*used, *cut, *dead]) == list(range(1, stats.fed + 1))
    assert [int(message.headers[headers.ORDINAL]) for message in stored] == used
    assert (stats.stored, stats.cut_tasks, stats.dead_letters) == (len(used), len(cut), len(dead))
    assert adds_up(stats) and slowest in cut
    assert all(len(entry.groups) + len(entry.cut) == GROUPS for entry in entries)
    late = [drop.ordinal for entry in entries for drop in entry.dropped]
    assert set(late) <= set(cut) and len(late) == len(set(late)) <= stats.late_groups
