"""What trinity.ui checks of a ledger holds of a real one: with dead and retried tasks, with groups used again."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from support.fakes.peers import FakeTrainer, a_failure, a_group, explorer
from support.servers.buffer_run import BufferRun
from trinity.data.experience import Outcome, Task
from trinity.reading.client import Buffer
from trinity.runtime import rpc
from trinity.ui.audit import Audit, count_problems

pytestmark = pytest.mark.core

Started = Callable[..., AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]]
DEAD = (2, 6)  # tasks that always fail, by ordinal
REPLAY = {"experience_buffer": {"replay_buffer": {"enable": True, "reuse_cooldown_time": 0.2}}}


def answer(task: Task, deliveries: int) -> Outcome:
    return a_failure(task, deliveries) if task.ordinal in DEAD else a_group(task, deliveries)


async def audited(run: BufferRun) -> Audit:
    """The run's ledger up to now. It adds up."""
    async with rpc.channel(run.buffer.address) as channel:
        buffer, audit = Buffer(channel, run.run), Audit()
        counts: dict[str, Any] = await buffer.counts()
        for step in range(1, counts["ledger_step"] + 1):
            audit.read(*await buffer.accounted_entry(step))
    assert count_problems(counts) == []
    assert audit.problems() == []
    assert audit.account is not None
    return audit


async def test_with_dead_and_retried_tasks(started: Started, tmp_path: Path) -> None:
    async with started(synchronizer={"sync_interval": 1}) as (run, trainer), explorer(run.nats.url, run.run, answer):
        for step in range(1, run.steps + 1):
            await trainer.batch(step)
            await audited(run)
            if step == 1:
                async with rpc.channel(run.buffer.address) as channel, asyncio.timeout(30):
                    assert await Buffer(channel, run.run).retry_letters([2]) == [2]
            await trainer.publish(step, tmp_path / f"w{step}")
        audit = await audited(run)
    assert audit.newest_step == run.steps
    assert audit.account is not None
    assert audit.account["requeued"] == [2]
    assert audit.account["dead"] == [6]


async def test_with_groups_that_are_used_again(started: Started) -> None:
    async with started(buffer={"trainer_input": REPLAY}) as (run, trainer), explorer(run.nats.url, run.run):
        for step in range(1, run.steps + 1):
            await trainer.batch(step)
        audit = await audited(run)
    assert audit.newest_step == run.steps
