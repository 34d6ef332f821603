"""A rollback, as sync writes it into KV: the buffer fences what was withdrawn, once, whatever dies meanwhile."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from support.fakes.data.experience import make_group
from support.fakes.explorers.sync_member import FakeMember
from support.fakes.peers import FakeTrainer, explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import experience_pb2
from trinity.buffer.run import Run
from trinity.buffer.settings import BufferSettings
from trinity.buffer.state.context import LiveVersions, RunContext
from trinity.config import load, make_plan
from trinity.data.experience import Outcome, Task
from trinity.runtime import names
from trinity.runtime.broker import Broker, Bucket, connect
from trinity.weights.manifest import Canary, Probe
from trinity.weights.pointer import Live, Rollback, decode_live, encode

pytestmark = pytest.mark.core

STEPS, INTERVAL = 8, 4
SYNCHRONIZER = {"sync_interval": INTERVAL}


@dataclass
class Serving:
    """Answers every task with tokens of one version."""

    version: int = 0

    def __call__(self, task: Task, deliveries: int) -> Outcome:
        return make_group(task, version=self.version, attempt=deliveries)


class Case:
    """A run whose batches 0 to 3 are trained and whose others are sampled by version 4, which may be withdrawn."""

    def __init__(self, run: BufferRun, trainer: FakeTrainer, broker: Broker, pointer: Bucket) -> None:
        self.run = run
        self.trainer = trainer
        self.broker = broker
        self._pointer = pointer
        self._names = names.RunNames(run.run)

    @contextlib.asynccontextmanager
    async def explorer(self, version: int) -> AsyncIterator[None]:
        async with explorer(self.run.nats.url, self.run.run, Serving(version)):
            yield

    async def change(self, change: Callable[[Live], Live]) -> None:
        """Of the pointer, as sync does it."""
        await self._pointer.update(self._names.live_key, lambda value: encode(change(decode_live(value))))

    async def roll_back(self, to: int = 0, newest: int = INTERVAL, **more: Any) -> None:
        def change(live: Live) -> Live:
            rollback = Rollback(len(live.rollbacks) + 1, to, newest, newest, **more)
            return replace(
                live,
                version=to,
                step=to,
                gate_step=max(live.gate_step, newest),
                rollbacks=(*live.rollbacks, rollback),
                withdrawn=(*live.withdrawn, (to, newest)),
            )

        await self.change(change)

    async def fences(self) -> list[list[int]]:
        """Versions of every fence in the log."""
        stream = self._names.experiences_stream
        last, found = (await self.broker.state(stream)).last_sequence, []
        for sequence in range(1, last + 1):
            message = await self.broker.get(stream, sequence)
            if message.subject == self._names.control:
                found.append(list(experience_pb2.Outcome.FromString(message.data).fence.versions))
        return found

    async def forget_message_ids(self) -> None:
        """As if the log's dedupe window were over."""
        config = (await self.broker.js.stream_info(self._names.experiences_stream)).config
        await self.broker.js.update_stream(replace(config, duplicate_window=0.1))
        await asyncio.sleep(0.5)

    async def until(self, holds: Callable[[pb.StatsResponse], bool], seconds: float = 30) -> pb.StatsResponse:
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if holds(stats := await self.trainer.stats()):
                        return stats
                await asyncio.sleep(0.02)

    async def ledger(self, first: int, last: int) -> list[pb.LedgerEntry]:
        return [await self.trainer.entry(step) for step in range(first, last + 1)]


@pytest.fixture
async def case(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Case]:
    run = BufferRun(tmp_path, nats_server, steps=STEPS, synchronizer=SYNCHRONIZER).start()
    trainer = run.trainer()
    try:
        await trainer.begin()
        async with await connect(nats_server.url, "test") as broker:
            case = Case(run, trainer, broker, await Bucket.open(broker, names.VERSIONS_BUCKET))
            async with case.explorer(0):
                await trainer.batch(4)
            await trainer.publish(INTERVAL, tmp_path / "w4")
            async with case.explorer(INTERVAL):
                await case.until(lambda stats: stats.stored == STEPS * run.groups)
            yield case
    finally:
        await trainer.close()
        run.stop()


async def finish(case: Case, version: int) -> list[pb.LedgerEntry]:
    """Everything is trained, with an explorer of this version; the whole ledger."""
    async with case.explorer(version):
        await case.trainer.batch(STEPS)
    stats = await case.trainer.stats()
    assert stats.fed == stats.stored + stats.dead_letters + stats.outstanding
    assert stats.dead_letters == 0
    return await case.ledger(1, STEPS)


def versions(entries: list[pb.LedgerEntry]) -> set[int]:
    return {group.newest_version for entry in entries for group in entry.groups}


async def test_a_fence_of_an_earlier_process_is_read_before_the_next_entry_is_written(case: Case) -> None:
    """Also where the trainer asks for that entry while the log is still being read."""
    await case.trainer.buffer.Fence(pb.FenceRequest(run=case.run.run, versions=[INTERVAL]), timeout=20)
    written = (await case.trainer.stats()).ledger_step
    assert written < STEPS
    case.run.buffer.kill()
    context = RunContext(case.broker, names.RunNames(case.run.run), make_plan(load(case.run.config_file)))
    versions = await Bucket.open(case.broker, names.VERSIONS_BUCKET)
    run = Run(context, versions, await Bucket.open(case.broker, names.RUNS_BUCKET), BufferSettings())
    await run.open()
    assert run.writer is not None
    following = asyncio.create_task(run.writer.run())
    try:
        async with context.wanted(STEPS), asyncio.timeout(20):
            while INTERVAL not in run.writer.window.fenced:
                await asyncio.sleep(0.02)
        assert run.ledger.newest_step == written
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_rollback_fences_what_no_ledger_entry_has_yet(case: Case) -> None:
    written = (await case.trainer.stats()).ledger_step
    before = await case.ledger(1, written)
    assert INTERVAL <= written < STEPS
    await case.roll_back()
    stats = await case.until(lambda stats: stats.dropped.get("fenced", 0) > 0)
    assert stats.dropped["fenced"] == (STEPS - written) * case.run.groups
    ledger = await finish(case, version=0)
    assert ledger[:written] == before, "what was handed out stays"
    assert versions(ledger[written:]) == {0}
    assert await case.fences() == [[1, 2, 3, 4]]


async def test_after_a_rollback_staleness_counts_the_steps_that_the_weights_have_behind_them(case: Case) -> None:
    """The trainer continues from version 0 with its step count: what step 5 updates is version 0 itself."""
    written = (await case.trainer.stats()).ledger_step
    await case.roll_back()
    ledger = await finish(case, version=0)
    for entry in ledger[written:]:
        assert {group.staleness_steps for group in entry.groups} == {entry.step - 1 - INTERVAL}


async def test_a_rollback_that_keeps_experience_drops_nothing(case: Case) -> None:
    """Groups of tasks whose gate only the withdrawn version met are taken from the older one, too."""
    written = (await case.trainer.stats()).ledger_step
    await case.roll_back(keep_experience=True)
    ledger = await finish(case, version=0)
    assert versions(ledger[written:]) == {INTERVAL}
    assert await case.fences() == []


async def test_a_rollback_while_the_buffer_is_down_is_fenced_before_the_next_entry(case: Case) -> None:
    """Although the trainer asks for everything as soon as the buffer is back, and all of it is in the log."""
    written = (await case.trainer.stats()).ledger_step
    case.run.buffer.kill()
    await case.roll_back()
    asking = asyncio.create_task(case.trainer.batch(STEPS))
    case.run.buffer.start()
    await case.until(lambda stats: stats.dropped.get("fenced", 0) > 0)
    ledger = await finish(case, version=0)
    await asking
    assert versions(ledger[written:]) == {0}
    assert await case.fences() == [[1, 2, 3, 4]]


async def test_groups_of_a_version_withdrawn_while_the_buffer_was_down_are_no_dead_letters(case: Case) -> None:
    """They are in the log before the fence, and name a version that is newer than what is LIVE by then."""
    case.run.buffer.kill()
    stats_before = STEPS * case.run.groups
    await case.roll_back()
    case.run.buffer.start()
    stats = await case.until(lambda stats: stats.stored >= stats_before)
    assert stats.dead_letters == 0


@pytest.mark.parametrize("delay_seconds", [0.0, 0.03])
async def test_killed_between_the_rollback_and_the_fence_there_is_one_fence(case: Case, delay_seconds: float) -> None:
    written = (await case.trainer.stats()).ledger_step
    await case.roll_back()
    await asyncio.sleep(delay_seconds)
    case.run.buffer.kill()
    case.run.buffer.start()
    await case.until(lambda stats: stats.dropped.get("fenced", 0) > 0)
    ledger = await finish(case, version=0)
    assert versions(ledger[written:]) == {0}
    assert await case.fences() == [[1, 2, 3, 4]]


async def test_a_fence_that_was_written_long_ago_is_not_written_again(case: Case) -> None:
    """Also when JetStream has forgotten its id: the fence is found in the log."""
    await case.roll_back()
    await case.until(lambda stats: stats.dropped.get("fenced", 0) > 0)
    await case.forget_message_ids()
    case.run.buffer.kill()
    case.run.buffer.start()
    await case.until(lambda stats: stats.dropped.get("fenced", 0) > 0)
    await finish(case, version=0)
    assert await case.fences() == [[1, 2, 3, 4]]


async def test_the_fence_that_a_caller_asks_for_as_well_is_the_same_one(case: Case) -> None:
    await case.roll_back()
    request = pb.FenceRequest(run=case.run.run, versions=[1, 2, 3, 4])
    answers = await asyncio.gather(*(case.trainer.buffer.Fence(request, timeout=20) for _ in range(3)))
    assert {answer.dropped for answer in answers} == {(await case.trainer.stats()).dropped["fenced"]}
    await finish(case, version=0)
    assert await case.fences() == [[1, 2, 3, 4]]


async def test_two_rollbacks_are_two_fences(case: Case, tmp_path: Path) -> None:
    await case.roll_back()
    await case.until(lambda stats: stats.dropped.get("fenced", 0) > 0)
    case.run.buffer.kill()
    await case.roll_back(newest=7)
    case.run.buffer.start()
    ledger = await finish(case, version=0)
    assert await case.fences() == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7]]
    assert ledger[-1].step == STEPS


async def test_tasks_whose_gate_a_rejected_version_would_have_met_are_run_by_the_one_before(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    """Version 4 is rejected: sync says that gates up to step 4 are met, and version 0 stays LIVE."""
    run = BufferRun(tmp_path, nats_server, steps=STEPS, synchronizer=SYNCHRONIZER).start()
    trainer = run.trainer()
    try:
        await trainer.begin()
        async with await connect(nats_server.url, "test") as broker:
            case = Case(run, trainer, broker, await Bucket.open(broker, names.VERSIONS_BUCKET))
            async with case.explorer(0):
                await trainer.batch(4)
                assert (await trainer.stats()).fed == 4 * run.groups
                await case.change(lambda live: replace(live, gate_step=INTERVAL))
            ledger = await finish(case, version=0)
    finally:
        await trainer.close()
        run.stop()
    assert [group.staleness_steps for entry in ledger for group in entry.groups] == [
        step for step in range(STEPS) for _ in range(run.groups)
    ]


async def test_what_a_version_rejected_long_ago_let_through_is_still_known(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    """Groups of such tasks may be stored when newer weights are LIVE, and the pointer says nothing of it any more."""
    run = BufferRun(tmp_path, nats_server, steps=STEPS, synchronizer=SYNCHRONIZER).start()
    trainer = run.trainer()
    canary = Canary((Probe((1, 2), (-1.5,)),), 0.01, 0.1)
    try:
        await trainer.begin()
        async with (
            FakeMember(run.sync.address, run.run, "one", error=0.7),
            await connect(run.nats.url, "test") as broker,
        ):
            pointer = await Bucket.open(broker, names.VERSIONS_BUCKET)
            context = RunContext(broker, names.RunNames(run.run), make_plan(load(run.config_file)))
            known = LiveVersions(context, pointer)
            assert not await known.meets(0, INTERVAL)
            await trainer.publish(INTERVAL, tmp_path / "w4", canary)
            async with asyncio.timeout(20):
                while (await known.look()).gate_step < INTERVAL:
                    await asyncio.sleep(0.05)
            assert context.live.version == 0
            assert await known.meets(0, INTERVAL)
            await trainer.publish(2 * INTERVAL, tmp_path / "w8")
            assert (await known.look()).version == 2 * INTERVAL
            assert await LiveVersions(context, pointer).meets(0, INTERVAL)
            assert not await known.meets(0, 2 * INTERVAL)
            assert not await known.meets(INTERVAL, 2 * INTERVAL)
            assert await known.was_live(2 * INTERVAL)
            assert not await known.was_live(2 * INTERVAL + 1)
    finally:
        await trainer.close()
        run.stop()


async def test_with_a_staleness_limit_a_rollback_does_not_drop_what_cannot_be_younger(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    """After a rollback to version 0 all there is to train is by version 0; dropping it would bring the same again."""
    strategy = {"sample_strategy": "staleness_control", "sample_strategy_args": {"staleness_limit": 3}}
    run = BufferRun(tmp_path, nats_server, steps=STEPS, synchronizer=SYNCHRONIZER, algorithm=strategy).start()
    trainer = run.trainer()
    try:
        await trainer.begin()
        async with await connect(nats_server.url, "test") as broker:
            case = Case(run, trainer, broker, await Bucket.open(broker, names.VERSIONS_BUCKET))
            async with case.explorer(0):
                await trainer.batch(4)
                await case.roll_back()
                begin = time.monotonic()
                await trainer.batch(STEPS, seconds=30)
            ledger = await case.ledger(5, STEPS)
            stats = await trainer.stats()
    finally:
        await trainer.close()
        run.stop()
    assert time.monotonic() - begin < 30
    assert [{group.staleness_steps for group in entry.groups} for entry in ledger] == [{0}, {1}, {2}, {3}]
    assert stats.dropped.get("stale", 0) == 0
