"""A task that an explorer acknowledges without a result is offered again; the run does not wait for it without end."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from support.fakes.peers import FakeTrainer, a_group, explorer
from support.servers.buffer_run import BufferRun
from trinity.data.experience import Outcome, Task

pytestmark = pytest.mark.core

Started = Callable[..., "contextlib.AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]"]


async def test_a_task_without_a_result_is_offered_again_also_by_the_next_buffer(
    started: Started, tmp_path: Path
) -> None:
    sums = {"path": str(tmp_path / "data"), "format": {"prompt_key": "question", "response_key": "answer"}}
    evaluated = {"name": "test", "split": "test", **sums}
    tasks = {"explorer_input": {"taskset": {"name": "sums", "split": "train", **sums}, "eval_tasksets": [evaluated]}}
    swallowed: list[str] = []

    def answer(task: Task, _: int) -> Outcome | None:
        twice = task.ordinal == 2
        if task.task_id.endswith(("/1", "/3")) and swallowed.count(task.task_id) < 1 + twice:
            swallowed.append(task.task_id)
            return None
        return a_group(task, 1)

    settings = {"UNREPORTED_SECONDS": "1"}
    async with started(steps=3, buffer=tasks, explorer={"eval_on_startup": True}, settings=settings) as (run, trainer):
        async with explorer(run.nats.url, run.run, answer), asyncio.timeout(120):
            await trainer.batch(1)
            run.buffer.kill()
            run.buffer.start()
            await trainer.batch(2)
            await trainer.batch(3)
            while (stats := await trainer.stats()).evaluations_outstanding:
                await asyncio.sleep(0.1)
        ordinals = [group.ordinal for step in (1, 2, 3) for group in (await trainer.entry(step)).groups]
        assert ordinals == list(range(1, 13))
        assert (stats.fed, stats.stored, stats.dead_letters, stats.outstanding) == (12, 12, 0, 0)
        assert {task.rpartition("/")[0] for task in swallowed} >= {"test/eval/0"}, swallowed
        lines = [event for event in run.buffer.events() if event["event"] == "buffer.task.unreported"]
        assert len(lines) >= 4
