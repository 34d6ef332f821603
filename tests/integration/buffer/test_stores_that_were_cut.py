"""A buffer on a store that has lost its newest writes, or that died between two ledger entries: no dead letters."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from support.fakes.data.experience import make_group
from support.fakes.peers import FakeTrainer, explorer
from support.servers.buffer_run import BufferRun
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.data.experience import Outcome, Task
from trinity.runtime import names
from trinity.runtime.broker import Broker, Bucket, connect
from trinity.runtime.errors import EXIT_FOR_GOOD

pytestmark = pytest.mark.extended

Started = Callable[..., AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]]
STEPS, AHEAD = 3, 6
Cut = Callable[[Broker, names.RunNames], object]


async def _train(run: BufferRun, trainer: FakeTrainer, folder: Path) -> None:
    """Trains and commits; then stored groups lie beyond the newest ledger entry."""
    newest = 0

    def answer(task: Task, deliveries: int) -> Outcome:
        return make_group(task, version=max(newest, task.gate_step), attempt=deliveries)

    async with explorer(run.nats.url, run.run, answer):
        for step in range(1, STEPS + 1):
            await trainer.batch(step)
            await trainer.publish(step, folder / f"w{step}")
            newest = step
            await _commit(trainer, step)
        groups = (STEPS + AHEAD + 1) * run.groups
        assert (await _judged(trainer, groups)).stored == groups
        await _commit(trainer, STEPS)


async def _commit(trainer: FakeTrainer, step: int) -> None:
    request = pb.CommitStepRequest(run=trainer.run, step=step, oldest_kept_step=step)
    await trainer.buffer.CommitStep(request, timeout=20)


async def _judged(trainer: FakeTrainer, groups: int) -> pb.StatsResponse:
    """The counts once so many groups are judged."""
    async with asyncio.timeout(30):
        while (stats := await trainer.stats()).stored + stats.dead_letters + stats.refused < groups:
            await asyncio.sleep(0.05)
    return stats


async def _cut(broker: Broker, stream: str, kept: int) -> None:
    """Deletes all messages above this sequence."""
    for sequence in range((await broker.state(stream)).last_sequence, kept, -1):
        await broker.delete(stream, sequence)


async def _lose_another(broker: Broker, stream: str) -> None:
    """Stores one more group, which no buffer has read, and loses it."""
    newest = await broker.get(stream, (await broker.state(stream)).last_sequence)
    stored = await broker.publish(newest.subject, newest.data, message_id="another")
    await broker.delete(stream, stored.sequence)


async def test_a_buffer_that_is_killed_behind_a_commit_takes_the_same_groups_again(
    started: Started, tmp_path: Path
) -> None:
    async with started(steps=12, synchronizer={"sync_interval": 1, "sync_offset": AHEAD}) as (run, trainer):
        await _train(run, trainer, tmp_path)
        before = await trainer.stats()
        run.buffer.kill()
        run.buffer.start()
        after = await _judged(trainer, before.stored)
    assert before.stored > STEPS * run.groups, "some groups lie beyond the ledger"
    assert (after.stored, after.dead_letters, after.refused) == (before.stored, 0, 0)


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        (lambda b, n: _cut(b, n.batches_stream, 2), "newest checkpoint is of step 3, but the ledger ends at step 2"),
        (lambda b, n: _lose_another(b, n.experiences_stream), "the newest, cannot be read: NATS has lost experience"),
        (lambda b, n: _cut(b, n.tasks_stream, 15), "of the ledger, but the queue was fed only"),
    ],
)
async def test_the_run_ends_with_the_streams_that_disagree(
    started: Started, tmp_path: Path, cut: Cut, reason: str
) -> None:
    async with started(steps=12, synchronizer={"sync_interval": 1, "sync_offset": AHEAD}) as (run, trainer):
        await _train(run, trainer, tmp_path)
        run.buffer.kill()
        async with await connect(run.nats.url, "test") as broker:
            await cut(broker, names.RunNames(run.run))  # type: ignore[misc]
            run.buffer.start(wait_seconds=0)
            assert await asyncio.to_thread(run.buffer.wait, 60) == EXIT_FOR_GOOD
            assert not (await broker.state(names.RunNames(run.run).dead_letters_stream)).messages
    assert any(reason in str(event.get("reason")) for event in run.buffer.events())


async def test_groups_of_forgotten_versions_wait_until_they_are_published_again(
    started: Started, tmp_path: Path
) -> None:
    async with started(steps=12, synchronizer={"sync_interval": 1, "sync_offset": AHEAD}) as (run, trainer):
        await _train(run, trainer, tmp_path)
        before = await trainer.stats()
        run.buffer.kill()
        run.sync.kill()
        async with await connect(run.nats.url, "test") as broker:
            versions = await Bucket.open(broker, names.VERSIONS_BUCKET)
            for key in await versions.entries(run.run):
                await versions.purge(key)
        run.sync.start()
        await trainer.begin()
        run.buffer.start()
        assert (await trainer.stats()).stored < before.stored, "groups of version 3 wait"
        for step in range(1, STEPS + 1):
            await trainer.publish(step, tmp_path / f"w{step}")
        after = await _judged(trainer, before.stored)
    assert (after.dead_letters, after.refused) == (0, 0)
