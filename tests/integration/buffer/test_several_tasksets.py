"""Tasks of several tasksets on a real buffer: the mixture's order, whenever it is killed, and what it remembers."""

import asyncio
import dataclasses
import json
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.fakes.data.experience import make_group
from support.fakes.data.vision import picture
from support.fakes.peers import FakeTrainer, explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import task_pb2
from trinity.config import Plan, load, make_plan
from trinity.data.experience import Group, Task, TaskKind
from trinity.data.task_source import TaskMixture, TaskSource
from trinity.data.wire import task_from_proto
from trinity.explorer.rollout import attempt
from trinity.runtime import names
from trinity.runtime.broker import connect

pytestmark = pytest.mark.core


@dataclasses.dataclass
class Live:
    """A buffer that runs, its trainer, and the plan they go by."""

    run: BufferRun
    trainer: FakeTrainer
    plan: Plan

    def mixture(self) -> TaskMixture:
        """The tasks of the run as a buffer that was never killed would take them."""
        return TaskMixture([TaskSource.open(self.run.run, self.plan, t, TaskKind.TRAIN) for t in self.plan.tasksets])

    async def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            await self.trainer.batch(step)
            if self.plan.staleness.publishes(step, self.run.steps):
                await self.publish(step)

    async def publish(self, step: int) -> None:
        await self.trainer.publish(step, self.run.folder / f"weights/{step}")

    async def kill(self) -> None:
        self.run.buffer.kill()
        await asyncio.to_thread(self.run.buffer.start)

    async def stats(self) -> pb.StatsResponse:
        """Waits for a buffer that was just started."""
        request = pb.StatsRequest(run=self.run.run)
        return await self.trainer.buffer.Stats(request, timeout=60, wait_for_ready=True)

    async def fed(self, number: int) -> list[Task]:
        """All tasks in the queue, once there are so many."""
        async with asyncio.timeout(30):
            while (await self.stats()).fed < number:
                await asyncio.sleep(0.05)
        async with await connect(self.run.nats.url, "look") as broker:
            stream = names.RunNames(self.run.run).tasks_stream
            last = (await broker.state(stream)).last_sequence
            found = [await broker.get(stream, ordinal) for ordinal in range(1, last + 1)]
        return [task_from_proto(task_pb2.Task.FromString(message.data)) for message in found]

    async def trained(self) -> list[str]:
        """Task ids in the order of the ledger."""
        entries = [await self.trainer.entry(step) for step in range(1, self.run.steps + 1)]
        return [group.task_id for entry in entries for group in entry.groups]


def taskset(folder: Path, name: str, rows: int, **options: Any) -> dict[str, Any]:
    path = folder / f"{name}.jsonl"
    lines = [{"question": f"{name} {i}", "answer": "#### 1", "rate": i / rows} for i in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"name": name, "path": str(path), "format": {"prompt_key": "question"}, **options}


@asynccontextmanager
async def running(
    folder: Path, nats: NatsServer, tasksets: list[dict[str, Any]], steps: int, groups: int, interval: int, offset: int
) -> AsyncIterator[Live]:
    buffer = {"batch_size": groups, "total_steps": steps, "explorer_input": {"tasksets": tasksets}}
    synchronizer = {"sync_interval": interval, "sync_offset": offset}
    run = BufferRun(folder, nats, steps=steps, groups=groups, buffer=buffer, synchronizer=synchronizer).start()
    trainer = run.trainer()
    try:
        await trainer.begin()
        yield Live(run, trainer, make_plan(load(run.config_file)))
    finally:
        await trainer.close()
        run.stop()


def reward_of(task: Task) -> float:
    """Some rows are solved always, some never, some half the time."""
    return (task.row % 3) / 2


def answer(task: Task, deliveries: int) -> Group:
    group = make_group(task, version=task.gate_step, attempt=deliveries)
    experiences = tuple(dataclasses.replace(one, reward=reward_of(task)) for one in group.experiences)
    return dataclasses.replace(group, experiences=experiences)


@pytest.mark.slow
async def test_tasks_of_both_come_in_the_mixtures_order_whenever_the_buffer_is_killed(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    tasksets = [
        taskset(tmp_path, "long", 30, data_selector={"selector_type": "shuffle"}),
        taskset(tmp_path, "short", 10, weight=3.0, data_selector={"selector_type": "random"}),
    ]
    steps, groups, rng = 15, 8, random.Random(7)
    async with running(tmp_path, nats_server, tasksets, steps, groups, interval=2, offset=1) as live:

        async def accident() -> None:
            """In the middle of a step, and then in the middle of starting, recovering or feeding."""
            for longest in (0.1, 1.5):
                await asyncio.sleep(rng.uniform(0.0, longest))
                live.run.buffer.kill()
                live.run.buffer.start(wait_seconds=0)

        async with explorer(live.run.nats.url, live.run.run, answer):
            for first, last in ((1, 3), (4, 7), (8, 10), (11, steps)):
                accidents = asyncio.create_task(accident())
                await live.train(first, last)
                await accidents
            await asyncio.to_thread(live.run.buffer.wait_serving, 60)
        mixture, total = live.mixture(), steps * groups
        expected = [mixture.train_task_later(position, position + 1, 0)().task_id for position in range(total)]
        tasks = await live.fed(total)
        assert [task.task_id for task in tasks] == expected
        assert [task.ordinal for task in tasks] == list(range(1, total + 1))
        assert [task.gate_step for task in tasks] == [
            live.plan.staleness.gate(batch) for batch in range(steps) for _ in range(groups)
        ]
        assert await live.trained() == expected
        assert len(set(expected)) == total
        assert Counter(task.taskset for task in tasks) == {"long": 60, "short": 60}
        stats = await live.stats()
        assert (stats.fed, stats.stored, stats.dead_letters, stats.outstanding) == (total, total, 0, 0)


def simulated(mixture: TaskMixture, steps: int, groups: int, told: Callable[[Task], float | None]) -> list[str]:
    """Task ids of a synchronous run: each batch is chosen when all rewards before it are known."""
    found: list[str] = []
    for step in range(steps):
        tasks = [mixture.train_task_later(step * groups + index, 1, step)() for index in range(groups)]
        for task in tasks:
            mixture.observe(task.task_id, told(task))
        found += [task.task_id for task in tasks]
    return found


@pytest.mark.slow
async def test_a_selector_that_learns_remembers_every_reward_after_a_restart(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    # lamb 0: what is learnt of a row then does not depend on the order in which a batch's groups came in
    learning = {"selector_type": "diff_based", "feature_keys": ["rate"], "kwargs": {"m": 2, "lamb": 0.0}}
    tasksets = [taskset(tmp_path, "rated", 8, data_selector=learning), taskset(tmp_path, "plain", 8)]
    steps, groups = 12, 4  # three epochs of both
    async with running(tmp_path, nats_server, tasksets, steps, groups, interval=1, offset=0) as live:
        expected = simulated(live.mixture(), steps, groups, reward_of)
        assert expected != simulated(live.mixture(), steps, groups, lambda task: None), "nothing is learnt here"
        async with explorer(live.run.nats.url, live.run.run, answer):
            for first, last in ((1, 5), (6, 10)):
                await live.train(first, last - 1)
                await live.trainer.batch(last)
                await live.kill()  # before the weights are LIVE that let the next batch be chosen
                await live.publish(last)
            await live.train(11, steps)
        assert await live.trained() == expected


async def test_rows_whose_tasks_are_out_when_the_buffer_is_killed_do_not_come_again_in_the_epoch(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    learning = {"selector_type": "diff_based", "feature_keys": ["rate"]}
    tasksets = [taskset(tmp_path, "rated", 16, data_selector=learning)]
    async with running(tmp_path, nats_server, tasksets, steps=4, groups=4, interval=1, offset=1) as live:
        first = await live.fed(8)
        run_names = names.RunNames(live.run.run)
        async with await connect(nats_server.url, "tester") as broker:
            for task in [*first[:4], first[6]]:  # the first batch, and one of the second, out of order
                await attempt.store(broker, run_names, answer(task, 1))
        await live.trainer.batch(1)
        await live.kill()
        await live.publish(1)
        rows = [task.row for task in await live.fed(12)]
        assert len(set(rows)) == 12, rows
        async with explorer(live.run.nats.url, live.run.run, answer):
            await live.train(2, 4)
        assert sorted(task.row for task in await live.fed(16)) == list(range(16))


async def test_an_image_that_is_long_in_coming_holds_up_its_task_alone(tmp_path: Path, nats_server: NatsServer) -> None:
    shown, asked, may_answer = picture(), threading.Event(), threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            may_answer.wait(20)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(shown)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}/"
    (tmp_path / "seen.jsonl").write_text(json.dumps({"question": "?", "answer": "1", "image": here + "a.png"}))
    form = {"prompt_key": "question", "image_key": "image", "image_urls": [here]}
    seen = {"name": "seen", "path": str(tmp_path / "seen.jsonl"), "format": form,
            "default_workflow_type": "simple_mm_workflow"}  # fmt: skip
    try:
        async with running(tmp_path, nats_server, [seen], steps=1, groups=1, interval=1, offset=1) as live:
            assert await asyncio.to_thread(asked.wait, 20)
            async with asyncio.timeout(5):
                assert (await live.stats()).fed == 0
            may_answer.set()
            (task,) = await live.fed(1)
            assert task.images == (shown,)
    finally:
        may_answer.set()
        server.shutdown()
        server.server_close()
