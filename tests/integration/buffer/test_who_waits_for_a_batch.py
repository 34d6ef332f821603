"""Time limits of a batch run while the trainer waits for it: not before, not after, and for no other reader.

The buffer, sync and NATS are real processes; explorer, trainer and readers are hand-written.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from support.fakes.peers import FakeTrainer, a_group, explorer
from support.servers.buffer_run import BufferRun
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.buffer.run import Run
from trinity.buffer.settings import BufferSettings
from trinity.buffer.state.context import RunContext
from trinity.config import load, make_plan
from trinity.data.experience import Outcome, Task
from trinity.runtime import names
from trinity.runtime.broker import Bucket, connect
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tokens import make_tokens

pytestmark = pytest.mark.core

Started = Callable[..., "contextlib.AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]"]

STEPS, GROUPS, SECONDS = 6, 4, 3.0
READ_TIMEOUT: dict[str, Any] = {
    "trainer_input": {"experience_buffer": {"max_read_timeout": SECONDS}},
    "batch_size": GROUPS,
    "total_steps": STEPS,
}


def incomplete_from(step: int) -> Callable[[Task, int], Outcome | None]:
    """One task of each batch from this step on has no result."""

    def answer(task: Task, deliveries: int) -> Outcome | None:
        return a_group(task, deliveries) if task.ordinal <= (step - 1) * GROUPS or task.ordinal % GROUPS else None

    return answer


async def waits_in_vain(trainer: FakeTrainer, step: int, seconds: float) -> None:
    with pytest.raises(TimeoutError):
        await trainer.batch(step, seconds)


async def ledger_step(trainer: FakeTrainer) -> int:
    return int((await trainer.stats()).ledger_step)


async def until_stored(trainer: FakeTrainer, groups: int) -> None:
    async with asyncio.timeout(30):
        while (await trainer.stats()).stored < groups:
            await asyncio.sleep(0.05)


async def test_no_batch_is_cut_while_no_trainer_is_connected(started: Started) -> None:
    async with (
        started(buffer=READ_TIMEOUT) as (run, trainer),
        explorer(run.nats.url, run.run, incomplete_from(1)),
    ):
        await waits_in_vain(trainer, 1, 1.0)
        await asyncio.sleep(SECONDS + 1)
        assert await ledger_step(trainer) == 0
        began = time.monotonic()
        await trainer.batch(1)
        assert time.monotonic() - began > SECONDS - 0.5
        assert (await trainer.entry(1)).partial


async def test_a_trainer_that_resumes_at_an_older_step_waits_the_whole_time(started: Started) -> None:
    async with (
        started(buffer=READ_TIMEOUT) as (run, trainer),
        explorer(run.nats.url, run.run, incomplete_from(3)),
    ):
        await trainer.batch(2)
        await waits_in_vain(trainer, 3, 1.0)
        await asyncio.sleep(SECONDS)
        steps = []
        call = trainer.buffer.StreamBatches(pb.StreamBatchesRequest(run=run.run, from_step=1))
        began = time.monotonic()
        async with asyncio.timeout(30):
            async for part in call:
                steps += [part.end.step] if part.HasField("end") else []
                if steps == [1, 2, 3]:
                    break
        call.cancel()
        assert time.monotonic() - began > SECONDS - 0.5
        assert [(await trainer.entry(step)).partial for step in (1, 2, 3)] == [False, False, True]


@contextlib.asynccontextmanager
async def reading(trainer: FakeTrainer, from_step: int, waits: bool) -> AsyncIterator[list[int]]:
    """A stream of the trainer's, and the steps whose batches it brought."""
    request, steps = pb.StreamBatchesRequest(run=trainer.run, from_step=from_step, waits=waits), list[int]()

    async def read() -> None:
        async for part in trainer.buffer.StreamBatches(request):
            steps.extend([part.end.step] if part.HasField("end") else [])

    running = asyncio.create_task(read())
    try:
        yield steps
    finally:
        running.cancel()


async def test_no_batch_is_cut_while_the_trainer_trains_the_ones_before(started: Started) -> None:
    async with (
        started(buffer=READ_TIMEOUT) as (run, trainer),
        explorer(run.nats.url, run.run, incomplete_from(2)),
    ):
        async with reading(trainer, 1, waits=True):  # it waited for the first one
            await asyncio.sleep(SECONDS + 1)
            assert await ledger_step(trainer) == 1
        async with reading(trainer, 2, waits=False):
            await asyncio.sleep(SECONDS + 1)
            assert await ledger_step(trainer) == 1
            began = time.monotonic()
            async with reading(trainer, 2, waits=True) as steps, asyncio.timeout(30):
                while not steps:
                    await asyncio.sleep(0.05)
        assert time.monotonic() - began > SECONDS - 0.5
        assert (await trainer.entry(2)).partial


async def test_a_trainer_that_reads_on_after_a_break_has_the_steps_before(started: Started) -> None:
    async with started() as (run, trainer), explorer(run.nats.url, run.run, incomplete_from(3)):
        await trainer.batch(2)
        skip = pb.SkipStepRequest(run=run.run, step=2, reason="a bad group")
        async with reading(trainer, 3, waits=True):
            await asyncio.sleep(0.5)
            with pytest.raises(grpc.aio.AioRpcError, match="step: 2 is being read by a trainer"):
                await trainer.buffer.SkipStep(skip, timeout=20)
        await asyncio.sleep(0.5)
        await trainer.buffer.SkipStep(skip, timeout=20)


async def test_a_trainer_that_asks_while_a_step_is_skipped_gets_the_skip(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started() as (run, trainer):
        async with explorer(run.nats.url, run.run):
            await trainer.batch(2)
        run.buffer.kill()
        async with await connect(run.nats.url, "test") as broker:
            versions = await Bucket.open(broker, names.VERSIONS_BUCKET)
            runs = await Bucket.open(broker, names.RUNS_BUCKET)
            context = RunContext(broker, names.RunNames(run.run), make_plan(load(run.config_file)))
            here, publish, may = Run(context, versions, runs, BufferSettings()), broker.publish, asyncio.Event()
            await here.open()

            async def publish_later(*args: Any, **named: Any) -> Any:
                await may.wait()
                return await publish(*args, **named)

            monkeypatch.setattr(broker, "publish", publish_later)
            skipping = asyncio.create_task(here.skip(2, "a bad group"))
            await asyncio.sleep(0.1)
            part = asyncio.ensure_future(anext(here.batches.parts(2, by_trainer=True)))
            await asyncio.sleep(0.1)
            may.set()
            assert (await skipping).skip_reason == (await part).skip_reason == "a bad group"


async def test_no_task_is_cut_while_no_trainer_is_connected(started: Started) -> None:
    changes: dict[str, Any] = {"over_rollout": {"ratio": 0.5, "wait_after_min": 1.0}}
    async with (
        started(explorer=changes) as (run, trainer),
        explorer(run.nats.url, run.run, incomplete_from(1)),
    ):
        await waits_in_vain(trainer, 1, 0.3)
        await until_stored(trainer, GROUPS - 1)
        await asyncio.sleep(2.0)
        assert await ledger_step(trainer) == 0
        await trainer.batch(1)
        assert [task.ordinal for task in (await trainer.entry(1)).cut] == [GROUPS]


async def test_groups_that_were_there_long_enough_are_a_step_once_it_is_waited_for(started: Started) -> None:
    changes: dict[str, Any] = {"over_rollout": {"ratio": 0.5, "wait_after_min": SECONDS}}
    async with (
        started(explorer=changes) as (run, trainer),
        explorer(run.nats.url, run.run, incomplete_from(1)),
        reading(trainer, 1, waits=False),
    ):
        await until_stored(trainer, GROUPS - 1)
        await asyncio.sleep(SECONDS + 0.5)
        assert await ledger_step(trainer) == 0, "the trainer trains"
        began = time.monotonic()
        async with reading(trainer, 1, waits=True) as steps, asyncio.timeout(30):
            while not steps:
                await asyncio.sleep(0.05)
        assert time.monotonic() - began < SECONDS - 0.5
        assert [task.ordinal for task in (await trainer.entry(1)).cut] == [GROUPS]


@contextlib.asynccontextmanager
async def calling(run: BufferRun, role: Role) -> AsyncIterator[FakeTrainer]:
    caller = FakeTrainer(run.run, run.buffer.address, run.sync.address, Identity(role, run.identities))
    try:
        yield caller
    finally:
        await caller.close()


async def look(caller: FakeTrainer, step: int, until: str) -> Any:
    """A stream that stays open, once it brought a part of this kind."""
    call = caller.buffer.StreamBatches(pb.StreamBatchesRequest(run=caller.run, from_step=step))
    async with asyncio.timeout(30):
        while not (await call.read()).HasField(until):
            pass
    return call


@pytest.mark.parametrize("role", [Role.READER, Role.OPERATOR])
async def test_who_only_looks_sets_no_time_limit_and_holds_none_off(
    role: Role, started: Started, tmp_path: Path
) -> None:
    make_tokens(tmp_path / "identity")
    async with (
        started(buffer=READ_TIMEOUT, identities=tmp_path / "identity") as (run, trainer),
        explorer(run.nats.url, run.run, incomplete_from(1)),
        calling(run, role) as looker,
        calling(run, Role.OPERATOR) as operator,
    ):
        streams = [await look(looker, step, until="waiting") for step in (1, STEPS)]
        await asyncio.sleep(SECONDS + 1)
        assert await ledger_step(trainer) == 0
        parts = [pb.BatchPart.FromString(part) for part in await trainer.batch(1, seconds=20)]
        assert parts[0].entry.partial
        streams.append(await look(looker, 1, until="end"))
        request = pb.SkipStepRequest(run=run.run, step=1, reason="no trainer reads it")
        await operator.buffer.SkipStep(request, timeout=20)
        for stream in streams:
            stream.cancel()
