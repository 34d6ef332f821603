"""The feeder puts tasks into the queue, never more than the staleness bound allows.

A task's ordinal is its sequence in the stream, so the stream itself is the durable count of what was fed. Tasks of
batch b are fed once weights of step gate(b) are LIVE; a dead letter is made up for by one more task.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, replace

import structlog

from trinity.buffer.mixture import Mixture
from trinity.buffer.shared import RunContext
from trinity.buffer.window import Window
from trinity.runtime import headers, tracing
from trinity.runtime.broker import SequenceConflict
from trinity.runtime.experience import Task
from trinity.runtime.metrics import Gauge
from trinity.runtime.wire import task_to_proto

log = structlog.get_logger(__name__)

FED = Gauge("trinity_buffer_tasks_fed", "Training tasks fed")


@dataclass(frozen=True)
class _Injected:
    task: Task
    stored: "asyncio.Future[bool]"


class Feeder:
    """Feeds one run. `fed` counts training tasks."""

    def __init__(self, context: RunContext, source: Mixture, window: Window) -> None:
        self._context = context
        self._source = source
        self._window = window
        self._injected: deque[_Injected] = deque()
        self._position = 0
        self.fed = 0

    async def recover(self) -> None:
        """Read from the stream how far feeding came."""
        stream = self._context.names.tasks_stream
        state = await self._context.broker.state(stream)
        self.fed = state.last_sequence
        if self.fed:
            newest = await self._context.broker.get(stream, self.fed)
            self._position = int(newest.headers[headers.POSITION])
            log.info("buffer.feeder.recovered", fed=self.fed, position=self._position)

    @property
    def position(self) -> int:
        """Tasks taken from the tasksets so far."""
        return self._position

    def allowed(self) -> int:
        """Training tasks that may have been fed by now."""
        if self._context.live_step < 0:
            return 0
        staleness = self._context.plan.staleness
        batches = self._context.live_step // staleness.interval * staleness.interval
        batches += staleness.interval + staleness.offset
        batches = min(batches, self._context.last_step)
        return batches * self._context.plan.groups_per_step + self._window.dead_letters

    async def run(self) -> None:
        while True:
            await self._context.bell.wait_for(lambda: self.fed < self.allowed())
            while self.fed < self.allowed():
                await self._feed_next()
            await self._context.bell.ring()

    async def clear(self) -> None:
        """Take dead tasks out of the queue. The newest task stays until another is fed: it holds the position."""

        def dead() -> list[int]:
            return [ordinal for ordinal in self._window.unqueued if ordinal < self.fed]

        while True:
            await self._context.bell.wait_for(lambda: bool(dead()))
            for ordinal in dead():
                await self._context.broker.delete(self._context.names.tasks_stream, ordinal)
                self._window.unqueued.discard(ordinal)

    async def inject(self, task: Task) -> "asyncio.Future[bool]":
        """Feed a task of the caller's before the taskset's own; resolves to False if it was there already."""
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._injected.append(_Injected(task, stored))
        await self._context.bell.ring()
        return stored

    async def _feed_next(self) -> None:
        ordinal = self.fed + 1
        batch = (ordinal - 1 - self._window.dead_letters) // self._context.plan.groups_per_step
        gate = self._context.plan.staleness.gate(batch)
        while self._injected and self._injected[0].stored.cancelled():
            self._injected.popleft()
        if not self._injected:
            await self._store(self._source.train_task(self._position, ordinal, gate), self._position + 1)
            self._position += 1
            return
        injected = self._injected.popleft()
        task = replace(injected.task, run=self._context.run, ordinal=ordinal, gate_step=gate)
        try:
            await self._store(task, self._position)
            fresh = True
        except SequenceConflict as error:
            if "stored at" not in str(error):
                raise
            fresh = False
        if not injected.stored.done():
            injected.stored.set_result(fresh)

    async def _store(self, task: Task, position: int) -> None:
        names = self._context.names
        with tracing.span("task.feed", task_id=task.task_id, ordinal=task.ordinal):
            self.fed = await self._context.broker.append(
                names.task(task.taskset),
                names.tasks_stream,
                task_to_proto(task).SerializeToString(),
                message_id=task.task_id,
                last_sequence=task.ordinal - 1,
                headers=tracing.inject({headers.POSITION: str(position)}),
            )
        FED.set(self.fed)
