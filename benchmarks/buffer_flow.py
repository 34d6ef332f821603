"""Groups on their way from the explorer's `store` to the trainer's StreamBatches, in a real buffer."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from support.buffer_run import BufferRun
from support.experience import make_group, make_task
from support.nats import NatsServer
from support.peers import FakeTrainer
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import task_pb2
from trinity.explorer import attempt
from trinity.runtime import names
from trinity.runtime.broker import Broker, connect, tail
from trinity.runtime.experience import Experience, Group, Task
from trinity.runtime.wire import encode_outcome, task_from_proto

IN_FLIGHT = 64
ROLLOUTS = 8
_FEED_SECONDS = 300.0


@dataclass
class Flow:
    """A run whose tasks are all fed; `groups` has the group to publish for each, in their order."""

    run: BufferRun
    trainer: FakeTrainer
    broker: Broker
    groups: list[Group]
    received_at: dict[int, float] = field(default_factory=dict)  # step -> when its batch was whole
    ordinals: dict[int, list[int]] = field(default_factory=dict)  # step -> its groups

    async def store(self, group: Group) -> None:
        await attempt.store(self.broker, names.RunNames(self.run.run), group)

    async def receive(self) -> None:
        """Every batch of the run, one after the other."""
        request, step, received = pb.StreamBatchesRequest(run=self.run.run, from_step=1), 0, 0
        async for part in self.trainer.buffer.StreamBatches(request):
            kind = part.WhichOneof("part")
            received += kind == "group"
            if kind == "entry":
                step = part.entry.step
                self.ordinals[step] = [group.ordinal for group in part.entry.groups]
            elif kind == "end":
                self.received_at[step] = time.perf_counter()
                if step == self.run.steps:
                    break
        assert received == len(self.groups), f"{received} groups came of {len(self.groups)}"


@contextlib.asynccontextmanager
async def flow(folder: Path, nats: NatsServer, response: int, count: int, per_step: int) -> AsyncIterator[Flow]:
    """Buffer and sync as processes, version 0 LIVE, `count` tasks fed and read back before anything is timed."""
    run = BufferRun(
        folder,
        nats,
        steps=count // per_step,
        groups=per_step,
        settings={"LOG_GIB": "8"},
        algorithm={"algorithm_type": "grpo", "repeat_times": ROLLOUTS},
        model={"max_response_tokens": response},
        synchronizer={"sync_interval": 100_000},
    ).start()
    trainer = run.trainer()
    try:
        await trainer.begin()
        async with await connect(nats.url, "bench") as broker:
            tasks = await _fed_tasks(broker, names.RunNames(run.run), count)
            experiences = rollouts(response)
            now = time.time()
            yield Flow(run, trainer, broker, [Group(task, 1, "bench", experiences, now, now) for task in tasks])
    finally:
        await trainer.close()
        run.stop()


async def _fed_tasks(broker: Broker, run: names.RunNames, count: int) -> list[Task]:
    """The tasks as the feeder put them: the buffer takes no group for any other."""
    tasks = []
    async with asyncio.timeout(_FEED_SECONDS):
        async for message in tail(broker, run.tasks_stream, 0):
            tasks.append(task_from_proto(task_pb2.Task.FromString(message.data)))
            if len(tasks) == count:
                return tasks
    raise AssertionError("the queue ended")


def rollouts(response: int) -> tuple[Experience, ...]:
    """The same tokens for every task, so that making them costs nothing."""
    return make_group(make_task(repeat_times=ROLLOUTS), response=response).experiences


def payload(response: int) -> bytes:
    """A group of that length as it is stored."""
    return encode_outcome(Group(make_task(repeat_times=ROLLOUTS), 1, "bench", rollouts(response), 0.0, 0.0))


async def seconds_of(folder: Path, nats: NatsServer, response: int, count: int, per_step: int) -> float:
    """From the first `store` to the last batch received, as fast as it goes with `IN_FLIGHT` groups on their way."""
    async with flow(folder, nats, response, count, per_step) as live:
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def store(group: Group) -> None:
            async with gate:
                await live.store(group)

        begin = time.perf_counter()
        receiving = asyncio.create_task(live.receive())
        await asyncio.gather(*(store(group) for group in live.groups))
        await receiving
        return time.perf_counter() - begin


@dataclass(frozen=True)
class Latencies:
    """In seconds. `batches`: from the moment at which `store` of a batch's last group was due until the trainer had the
    whole batch. `groups`: the same from each group's own moment, so with the wait for the rest of its batch."""

    batches: list[float]
    groups: list[float]


async def latencies_of(
    folder: Path, nats: NatsServer, response: int, count: int, per_step: int, rate: float
) -> Latencies:
    """At `rate` groups a second, whether or not earlier ones are there already."""
    async with flow(folder, nats, response, count, per_step) as live:
        receiving = asyncio.create_task(live.receive())
        begin = time.perf_counter() + 0.1
        due_at = {group.task.ordinal: begin + index / rate for index, group in enumerate(live.groups)}
        storing = []
        for group in live.groups:
            await asyncio.sleep(max(0.0, due_at[group.task.ordinal] - time.perf_counter()))
            storing.append(asyncio.create_task(live.store(group)))
        await asyncio.gather(*storing, receiving)
    batches = [at - max(due_at[o] for o in live.ordinals[step]) for step, at in live.received_at.items()]
    groups = [at - due_at[o] for step, at in live.received_at.items() for o in live.ordinals[step]]
    return Latencies(batches, groups)
