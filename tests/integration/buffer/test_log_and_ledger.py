"""The buffer on a real JetStream: tasks out, groups in, the ledger, batches. Peers are hand-written, processes real."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc.aio
import numpy as np
import pytest

from support.fakes.data.experience import make_group
from support.fakes.peers import FakeTrainer, a_failure, a_group, explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.buffer.ledger import entries
from trinity.buffer.ledger.wire import Entry
from trinity.buffer.run import Run
from trinity.buffer.settings import BufferSettings
from trinity.buffer.state.context import RunContext
from trinity.buffer.state.streams import stream_specs
from trinity.buffer.window.groups import Kept, StoredGroup
from trinity.config import load, make_plan
from trinity.data.experience import Group, Outcome, Task
from trinity.data.wire import decode_outcome
from trinity.runtime import names
from trinity.runtime.broker import Bucket, connect, ensure_streams
from trinity.runtime.errors import DataLoss

pytestmark = pytest.mark.core


@pytest.fixture
async def run(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[BufferRun]:
    started = BufferRun(tmp_path, nats_server, model={"max_response_tokens": 300_000}).start()
    yield started
    started.stop()


@pytest.fixture
async def trainer(run: BufferRun) -> AsyncIterator[FakeTrainer]:
    fake = run.trainer()
    await fake.begin()
    yield fake
    await fake.close()


def adds_up(stats: pb.StatsResponse) -> bool:
    return bool(stats.fed == stats.stored + stats.dead_letters + stats.outstanding)


async def test_every_task_is_trained_once_in_the_order_of_feeding(run: BufferRun, trainer: FakeTrainer) -> None:
    async with explorer(run.nats.url, run.run):
        for step in range(1, run.steps + 1):
            await trainer.batch(step)
    entries = [await trainer.entry(step) for step in range(1, run.steps + 1)]
    ordinals = [group.ordinal for entry in entries for group in entry.groups]
    assert ordinals == list(range(1, run.steps * run.groups + 1))
    stats = await trainer.stats()
    assert adds_up(stats)
    assert (stats.fed, stats.stored, stats.dead_letters) == (24, 24, 0)


async def test_the_same_step_is_the_same_bytes(run: BufferRun, trainer: FakeTrainer) -> None:
    async with explorer(run.nats.url, run.run):
        first = [await trainer.batch(step) for step in (1, 2)]
    run.buffer.kill()
    run.buffer.start()
    assert [await trainer.batch(step) for step in (1, 2)] == first


async def test_a_group_published_twice_is_trained_once(run: BufferRun, trainer: FakeTrainer) -> None:
    async with explorer(run.nats.url, run.run, publish_twice=True):
        await trainer.batch(run.steps)
    entries = [await trainer.entry(step) for step in range(1, run.steps + 1)]
    task_ids = [group.task_id for entry in entries for group in entry.groups]
    assert len(task_ids) == len(set(task_ids)) == run.steps * run.groups
    stats = await trainer.stats()
    assert stats.duplicates_dropped > 0
    assert adds_up(stats)


async def test_a_task_that_always_fails_ends_as_one_dead_letter_with_its_cause(
    run: BufferRun, trainer: FakeTrainer
) -> None:
    def answer(task: Task, deliveries: int) -> Outcome:
        return a_failure(task, deliveries) if task.ordinal in (2, 5) else a_group(task, deliveries)

    async with explorer(run.nats.url, run.run, answer):
        await trainer.batch(run.steps)
        letters = (await trainer.buffer.ListDeadLetters(pb.ListDeadLettersRequest(run=run.run))).dead_letters
    assert sorted(letter.task.ordinal for letter in letters) == [2, 5]
    assert {(letter.cause, letter.error, letter.attempt) for letter in letters} == {
        ("workflow_error", "it always fails", 3)
    }
    stats = await trainer.stats()
    assert stats.dead_letters == 2
    assert stats.stored == run.steps * run.groups
    assert adds_up(stats)


async def test_a_failed_attempt_is_made_again(run: BufferRun, trainer: FakeTrainer) -> None:
    def answer(task: Task, deliveries: int) -> Outcome:
        return a_failure(task, deliveries) if deliveries == 1 and task.ordinal % 3 == 0 else a_group(task, deliveries)

    async with explorer(run.nats.url, run.run, answer):
        await trainer.batch(run.steps)
    stats = await trainer.stats()
    assert (stats.dead_letters, stats.failed_attempts, stats.stored) == (0, 8, 24)


async def test_a_group_above_the_message_limit_goes_by_reference(run: BufferRun, trainer: FakeTrainer) -> None:
    def answer(task: Task, deliveries: int) -> Outcome:
        return make_group(task, response=300_000 if task.ordinal == 3 else 8)  # 4 x 300,000 x 9 bytes: above 8 MiB

    async with explorer(run.nats.url, run.run, answer):
        parts = [pb.BatchPart.FromString(part) for part in await trainer.batch(1)]
    groups = [decode_outcome(part.group.outcome) for part in parts if part.HasField("group")]
    (big,) = [group for group in groups if group.task.ordinal == 3]
    expected = make_group(big.task, response=300_000)
    assert isinstance(big, Group)
    assert np.array_equal(big.experiences[0].token_ids, expected.experiences[0].token_ids)
    async with await connect(run.nats.url, "look") as broker:
        assert (await broker.state(names.RunNames(run.run).blobs_stream)).messages >= 10


async def test_damaged_and_wrong_entries_are_dead_letters_and_the_log_goes_on(
    run: BufferRun, trainer: FakeTrainer
) -> None:
    def answer(task: Task, deliveries: int) -> Outcome:
        group = make_group(task)
        if task.ordinal == 1:
            group.experiences[0].logprobs[0] = float("nan")
        return group

    async with explorer(run.nats.url, run.run, answer):
        await trainer.batch(1)
    letters = (await trainer.buffer.ListDeadLetters(pb.ListDeadLettersRequest(run=run.run))).dead_letters
    assert [letter.cause for letter in letters] == ["invalid_experience"]
    assert "group.experiences[0].logprobs" in letters[0].error


async def test_killing_the_buffer_at_random_moments_changes_nothing(run: BufferRun, trainer: FakeTrainer) -> None:
    rng = random.Random(7)
    async with explorer(run.nats.url, run.run):
        for _ in range(4):
            await asyncio.sleep(rng.uniform(0.0, 0.4))
            run.buffer.kill()
            run.buffer.start(wait_seconds=0)
        before = [await trainer.batch(step) for step in range(1, run.steps + 1)]
    run.buffer.kill()
    run.buffer.start()
    assert [await trainer.batch(step) for step in range(1, run.steps + 1)] == before
    entries = [await trainer.entry(step) for step in range(1, run.steps + 1)]
    assert [group.ordinal for entry in entries for group in entry.groups] == list(range(1, 25))
    assert adds_up(await trainer.stats())


async def test_killing_nats_loses_nothing_that_was_acknowledged(run: BufferRun, trainer: FakeTrainer) -> None:
    async with explorer(run.nats.url, run.run):
        first = await trainer.batch(2)
        run.nats.kill()
        await asyncio.sleep(0.5)
        run.nats.start()
        await trainer.batch(run.steps)
        assert await trainer.batch(2) == first
    stats = await trainer.stats()
    assert stats.stored == run.steps * run.groups
    assert adds_up(stats)


async def test_commit_releases_and_rewind_goes_back_as_far_as_a_kept_checkpoint(
    run: BufferRun, trainer: FakeTrainer
) -> None:
    # One task at a time: entry 1 of the log is then of step 1, and the cut below step 3 removes it.
    async with explorer(run.nats.url, run.run, tasks_at_once=1):
        kept = await trainer.batch(4)
        await trainer.batch(run.steps)
    await trainer.buffer.CommitStep(pb.CommitStepRequest(run=run.run, step=5, oldest_kept_step=3), timeout=20)
    async with await connect(run.nats.url, "look") as broker:
        assert (await broker.state(names.RunNames(run.run).experiences_stream)).first_sequence > 1
    answer = await trainer.buffer.Rewind(pb.RewindRequest(run=run.run, step=3), timeout=20)
    assert answer.newest_step == run.steps
    assert await trainer.batch(4) == kept
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await trainer.buffer.Rewind(pb.RewindRequest(run=run.run, step=1), timeout=20)
    assert refused.value.code() is grpc.StatusCode.DATA_LOSS


async def test_long_cursors_stay_for_kept_checkpoints_as_far_as_there_is_room(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork begins with the cursor of its step."""
    monkeypatch.setattr(entries, "_LONG_CURSOR_BYTES", 100)
    run = names.RunNames("long-cursors")
    async with await connect(nats_server.url, "look") as broker:
        specs = stream_specs(run, log_bytes=8 * 40_000, replicas=1)
        await ensure_streams(broker, specs)
        ledger = entries.Ledger(RunContext(broker, run, cast(Any, None)))
        await ledger.open()

        async def append(step: int, size: int) -> None:
            cursor = pb.LedgerCursor(log_sequence=step, ended=[1] * size).SerializeToString()
            await ledger.append(Entry(run.run, step, "fifo", 1.0, cursor=cursor))

        async def kept() -> list[int]:
            found = []
            for step in range(1, ledger.newest_step + 1):
                with contextlib.suppress(DataLoss):
                    cursor = await ledger.cursor_of(await ledger.get(step))
                    found.append(pb.LedgerCursor.FromString(cursor).log_sequence)
            return found

        for step, size in enumerate((1000, 1000, 10, 1000, 1000), 1):
            await append(step, size)
        await ledger.release_cursors(0)
        assert await kept() == [1, 2, 3, 4, 5]
        await ledger.release_cursors(2)
        assert await kept() == [2, 3, 4, 5]
        await ledger.release_cursors(3)
        assert await kept() == [3, 4, 5], "a short one lies in its entry"
        for step in range(6, 60):
            await append(step, 1000)
        newest = await kept()
        assert newest[-1] == 59
        assert 5 < len(newest) < 40
        assert (await broker.state(run.cursors_stream)).bytes < 40_000


async def test_an_entry_that_no_message_holds_ends_the_run_for_good_and_names_the_fix(nats_server: NatsServer) -> None:
    run = names.RunNames("large-entries")
    changed = StoredGroup(1, "t", 1, 9000, 0, 0, 9000, 0.5, kept=tuple(Kept(index, 0.5) for index in range(9000)))
    entry = Entry(run.run, 1, "fifo", 1.0, groups=(changed,), operators=("reward_filter",))
    waiting = pb.LedgerCursor(ended=[2**60] * 9000).SerializeToString()
    async with await connect(nats_server.url, "look") as broker:
        await ensure_streams(broker, stream_specs(run, log_bytes=2**20, replicas=1))
        ledger = entries.Ledger(RunContext(broker, run, cast(Any, None)))
        await ledger.open()
        broker.client._max_payload = 90_000
        with pytest.raises(
            entries.EntryTooLarge, match=r"9000 experiences .*\(reward_filter\).* 73616: .*batch_size, "
        ):
            await ledger.append(entry)
        assert entries.EntryTooLarge.for_good
        with pytest.raises(
            entries.EntryTooLarge, match=r"step 1: .*experience_buffer\.capacity .*, or raise max_payload"
        ):
            await ledger.append(replace(entry, groups=(), cursor=waiting))
        assert (await broker.state(run.batches_stream)).messages == 0
        assert (await broker.state(run.cursors_stream)).messages == 0
        await ledger.append(replace(entry, groups=(replace(changed, kept=changed.kept[:1000]),)))


async def test_a_checkpoint_releases_the_cursors_before_the_oldest_kept_one(
    run: BufferRun, trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with explorer(run.nats.url, run.run):
        await trainer.batch(2)
    run.buffer.kill()
    released: list[int] = []

    async def note(_: entries.Ledger, oldest_kept_step: int) -> None:
        released.append(oldest_kept_step)

    monkeypatch.setattr(entries.Ledger, "release_cursors", note)
    async with await connect(run.nats.url, "test") as broker:
        versions, runs = await Bucket.open(broker, names.VERSIONS_BUCKET), await Bucket.open(broker, names.RUNS_BUCKET)
        context = RunContext(broker, names.RunNames(run.run), make_plan(load(run.config_file)))
        here = Run(context, versions, runs, BufferSettings())
        await here.open()
        await here.commit(2, 1)
    assert released == [1]


async def test_a_foreign_stream_is_refused_with_the_difference_and_left_alone(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    run = BufferRun(tmp_path, nats_server)
    stream = names.RunNames(run.run).experiences_stream
    async with await connect(nats_server.url, "foreign") as broker:
        await broker.js.add_stream(name=stream, subjects=["something.else"])
        run.buffer.start(wait_seconds=0)
        assert await asyncio.to_thread(run.buffer.wait, 60) == 1
        (reason,) = [str(event["reason"]) for event in run.buffer.events() if event["event"] == "service.failed"]
        assert stream in reason
        assert "something.else" in reason
        assert (await broker.js.stream_info(stream)).config.subjects == ["something.else"]


async def test_no_more_is_outstanding_than_staleness_allows(tmp_path: Path, nats_server: NatsServer) -> None:
    run = BufferRun(tmp_path, nats_server, synchronizer={"sync_interval": 2, "sync_offset": 1}).start()
    trainer = run.trainer()
    try:
        await trainer.begin()
        async with asyncio.timeout(30):
            while (await trainer.stats()).fed < (2 + 1) * run.groups:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        stats = await trainer.stats()
        assert (stats.fed, stats.max_staleness_steps) == ((2 + 1) * run.groups, 2)
    finally:
        await trainer.close()
        run.stop()
