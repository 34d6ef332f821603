"""Evaluations of a buffer that is killed: other rows than before, and results so large that they lie in blobs."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.fakes.data.experience import make_group
from support.fakes.peers import FakeTrainer, a_group, explorer
from support.servers.buffer_run import BufferRun
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.data.experience import Group, Outcome, Task, TaskKind
from trinity.explorer.rollout import attempt
from trinity.runtime import headers, names
from trinity.runtime.broker import connect

pytestmark = [pytest.mark.core, pytest.mark.timeout(300)]

Started = Callable[..., "contextlib.AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]"]

STEPS, GROUPS, ROWS = 2, 4, 5
LARGE = 1_000_000  # tokens: such a response is above NATS's message size
LOG_GIB = 0.04  # less than ROWS of them


def changes(folder: Path, *evaluated: str) -> dict[str, Any]:
    """Of a run that evaluates these tasksets, ROWS rows each, after every step."""
    form = {"prompt_key": "question", "response_key": "answer"}
    train = {"name": "sums", "path": str(folder / "data"), "split": "train", "format": form}
    tasksets = []
    for name in evaluated:
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"question": f"{i}+1", "answer": f"{i + 1}"}) + "\n" for i in range(ROWS)))
        tasksets.append({"name": name, "path": str(path), "format": form})
    buffer = {"batch_size": GROUPS, "total_steps": STEPS}
    return {
        "steps": STEPS,
        "buffer": {**buffer, "explorer_input": {"taskset": train, "eval_tasksets": tasksets}},
        "explorer": {"eval_interval": 1},
        "synchronizer": {"sync_interval": 1},
        "model": {"max_response_tokens": LARGE},
        "settings": {"LOG_GIB": str(LOG_GIB), "UNREPORTED_SECONDS": "3"},
    }


async def train(trainer: FakeTrainer, folder: Path, step: int) -> None:
    await trainer.batch(step)
    await trainer.publish(step, folder / f"weights/{step}")
    request = pb.CommitStepRequest(run=trainer.run, step=step, oldest_kept_step=step)
    await trainer.buffer.CommitStep(request, timeout=20)


async def until(holds: Callable[[pb.StatsResponse], bool], trainer: FakeTrainer, seconds: float = 90) -> Any:
    async with asyncio.timeout(seconds):
        while not holds(stats := await trainer.buffer.Stats(pb.StatsRequest(run=trainer.run), wait_for_ready=True)):
            await asyncio.sleep(0.1)
    return stats


def counts(stats: pb.StatsResponse) -> dict[tuple[int, str], float]:
    """Finished tasks of each evaluation in Stats."""
    return {(e.step, e.taskset): e.metrics["finished_task_count"] for e in stats.evaluations}


@pytest.mark.parametrize(("before", "after"), [(ROWS, ROWS + 1), (ROWS, ROWS - 2)])
async def test_a_run_whose_evaluation_rows_are_others_after_a_restart_ends(
    before: int, after: int, started: Started, tmp_path: Path
) -> None:
    """With a second taskset, whose rows are then others of all; the evaluation of step 1 is continued with the rows."""
    async with started(**changes(tmp_path, "held", "kept")) as (run, trainer), explorer(run.nats.url, run.run):
        await train(trainer, tmp_path, 1)
        await until(lambda stats: len(stats.evaluations) == 4, trainer)
        run.buffer.kill()
        file = tmp_path / "held.jsonl"
        lines = file.read_text().splitlines()
        file.write_text("\n".join([*lines, json.dumps({"question": "6+1", "answer": "7"})][:after]) + "\n")
        await asyncio.to_thread(run.buffer.start)
        await train(trainer, tmp_path, 2)
        stats = await until(lambda stats: stats.finished, trainer)
    assert stats.evaluations_outstanding == 0
    found = counts(stats)
    assert found.pop((2, "held")) == after
    assert found.pop((1, "held")) in {before, after}
    assert found == {(0, "held"): before, **{(step, "kept"): ROWS for step in (0, 1, 2)}}


async def test_large_results_go_when_their_evaluation_is_over_and_its_metrics_stay(
    started: Started, tmp_path: Path
) -> None:
    stored: list[Group] = []
    last_may_come = asyncio.Event()

    def answer(task: Task, deliveries: int) -> Outcome | None:
        if task.kind is not TaskKind.EVALUATION or task.taskset != "held":
            return a_group(task, deliveries)
        if task.row == ROWS - 1 and not last_may_come.is_set():
            return None  # it is offered again
        stored.append(make_group(task, version=task.gate_step, response=LARGE))
        return stored[-1]

    async with (
        started(**changes(tmp_path, "held", "small")) as (run, trainer),
        await connect(run.nats.url, "look") as broker,
    ):
        run_names = names.RunNames(run.run)

        async def has(stream: str, messages: int) -> None:
            async with asyncio.timeout(30):
                while (await broker.state(stream)).messages != messages:
                    await asyncio.sleep(0.1)

        async with explorer(run.nats.url, run.run, answer):
            most = LARGE  # bytes; a large result has 9 times as many
            await until(lambda stats: stats.evaluations_outstanding == 1 and stats.log_bytes < most, trainer)
            assert (await broker.state(run_names.blobs_stream)).bytes > (ROWS - 1) * LARGE
            last_may_come.set()
            for step in (1, 2):
                await until(lambda stats: len(stats.evaluations) == 2 * step, trainer)  # noqa: B023
                await train(trainer, tmp_path, step)
            before = await until(lambda stats: stats.finished, trainer)
        assert counts(before) == {(step, name): ROWS for step in (0, 1, 2) for name in ("held", "small")}
        assert before.evaluation_tokens > 3 * ROWS * LARGE / 2
        await has(run_names.blobs_stream, 0)
        assert before.log_limit_bytes == int(LOG_GIB * 2**30), "it did not have to grow"

        run.buffer.kill()
        task = run_names.evaluation_task("small")  # one more is left, as by a buffer that died before it cut
        newest = await broker.last(run_names.evaluation_tasks_stream, task)
        marks = {name: newest.headers[name] for name in (headers.EVALUATION_STEP, headers.EVALUATION_INDEX)}
        await broker.publish(task, newest.data, message_id="left", headers=marks)
        await asyncio.to_thread(run.buffer.start)
        after = await until(lambda stats: stats.finished, trainer)
        assert list(after.evaluations) == list(before.evaluations)
        assert after.evaluation_tokens == before.evaluation_tokens
        await has(run_names.blobs_stream, 0)
        await has(run_names.evaluations_stream, 0)
        await has(run_names.evaluation_tasks_stream, 1)  # the newest has the counts

        config = (await broker.js.stream_info(run_names.evaluations_stream)).config
        await broker.js.update_stream(replace(config, duplicate_window=0.1))
        await asyncio.sleep(0.5)
        await attempt.store(broker, run_names, replace(stored[0], attempt=2))  # an explorer that was thought dead
        assert (await broker.state(run_names.evaluations_stream)).last_sequence > 3 * 2 * ROWS
        await has(run_names.blobs_stream, 0)
        assert (await until(lambda stats: stats.finished, trainer)).evaluations == after.evaluations
        assert not [event for event in run.buffer.events() if event["event"] == "buffer.evaluation.refused"]
