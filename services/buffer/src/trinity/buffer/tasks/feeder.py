"""The feeder puts tasks into the queue, never more than the staleness bound allows.

The newest message of the queue says how many tasks were fed and how far the tasksets were read. Tasks of batch b are
fed once weights of step gate(b) are LIVE; a task that brings no group into a batch (a dead letter, a group that was
dropped) is made up for by one more. A dead task that is fed again takes the place of a new one, under the next ordinal
and with its gate: so the bound holds for it too.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import structlog

from trinity.buffer.log.wire import LogEntry, TaskMessage
from trinity.buffer.state.context import RunContext
from trinity.buffer.state.streams import append_past_others, newest_of_ours
from trinity.buffer.tasks.given import GivenIds
from trinity.buffer.tasks.joined import JoinedTasksets, Waiting
from trinity.buffer.window.window import Window
from trinity.data.experience import Task
from trinity.data.task_source import TaskMixture
from trinity.data.traffic import TASKSET
from trinity.runtime import headers, tracing
from trinity.runtime.broker import SequenceConflict, StoredMessage, on_subject
from trinity.runtime.errors import NotFound
from trinity.runtime.metrics import Gauge

log = structlog.get_logger(__name__)

FED = Gauge("trinity_buffer_tasks_fed", "Training tasks fed")

_REMEMBERED = 256
_COUNTS = (headers.FED, headers.POSITION)
_LONGEST_COUNT = 16  # digits
_READ_AHEAD = 256
# Id, log-probability and mask.
_BYTES_PER_TOKEN = 9


class Feeder:
    """Feeds one run."""

    def __init__(
        self,
        context: RunContext,
        source: TaskMixture,
        window: Callable[[], Window],
        ids_in_ledger: Callable[[], Awaitable[set[str]]],
        rewarded: Any = None,
    ) -> None:
        """`rewarded`: of trinity-traffic, in place of rows of a source."""
        self._context = context
        self._source = source
        self._rewarded = rewarded
        self._window_of = window
        self._injected: deque[Waiting] = deque()
        self.given = GivenIds(context, window, ids_in_ledger)
        self.joined = JoinedTasksets(source.weight, context.plan.groups_per_step)
        self._position = 0
        self._sequence = 0
        self._tasks: dict[int, TaskMessage] = {}  # fed and not ended, as far as this process knows
        self._forget_at = _REMEMBERED
        self._storing = asyncio.Lock()

    @property
    def _window(self) -> Window:
        return self._window_of()

    @property
    def fed(self) -> int:
        """Training tasks fed."""
        return self._context.fed

    async def recover(self) -> None:
        """Read from the stream how far feeding came."""
        stream = self._context.names.tasks_stream
        self._sequence = (await self._context.broker.state(stream)).last_sequence
        newest, origin = await newest_fed(self._context), self._context.origin
        if newest is None and origin is not None:
            self._context.fed, self._position = origin.fed, origin.position
        if newest is not None:
            self._context.fed = int(newest.headers[headers.FED])
            self._position = int(newest.headers[headers.POSITION])
            requeued = newest.headers.get(headers.REQUEUED, "")  # an earlier release did not write it
            self._window.requeued_through = int(requeued) if _is_count(requeued) else 0
            self.joined.keep(JoinedTasksets.from_header(newest.headers.get(headers.JOINED, "")))
            rewarded = newest.headers.get(headers.REWARDED, "")
            if self._rewarded is not None and _is_count(rewarded):
                self._rewarded.through = int(rewarded)
            log.info("buffer.feeder.recovered", fed=self.fed, position=self._position)

    async def feed_left_out(self) -> None:
        """Feeds the tasks of a fork that its parent had fed before others that ended."""
        if (origin := self._context.origin) is None:
            return
        for ordinal in self._window.outstanding(origin.fed):
            try:
                await self.task(ordinal)
            except NotFound:
                position, gate = origin.position - (origin.fed - ordinal) - 1, self.gate(ordinal)
                task = await asyncio.to_thread(self._source.train_task_later(max(0, position), ordinal, gate))
                await self._store(task, self._position)

    async def task(self, ordinal: int, taskset: str = "") -> TaskMessage:
        """Returns the task of an ordinal (and taskset) as it was fed. Raises NotFound if it was not, or is gone."""
        if ordinal in self._tasks:
            return self._tasks[ordinal]
        if not 1 <= ordinal <= self.fed + 1:  # the next task may already be in the queue
            raise NotFound(f"task {ordinal} was not fed")
        names = self._context.names
        own = [source.taskset.name for source in self._source.sources] or [TASKSET]
        for name in [taskset] if taskset else [*own, *self.joined.names]:
            found = await self._newest(names.task(name, ordinal))
            if found is not None:
                if ordinal + 1 not in self._tasks:
                    await self._read_ahead(found.sequence + 1)
                task = task_in(self._context, found)
                assert task is not None  # _newest has found it there
                return self._remember(task)
        raise NotFound(f"task {ordinal} is not in the queue")

    async def _newest(self, subject: str) -> StoredMessage | None:
        """The newest message with the task of a subject. There is one, unless another process wrote under it."""
        newest = None
        async for message in on_subject(self._context.broker, self._context.names.tasks_stream, subject):
            newest = message if task_in(self._context, message) else newest
        return newest

    async def _read_ahead(self, sequence: int) -> None:
        """After a restart groups come of tasks near by: one question for many of them, not one for each."""
        for message in await self._context.broker.several(self._context.names.tasks_stream, sequence, _READ_AHEAD):
            task = task_in(self._context, message)
            if task is not None and task.ordinal not in self._tasks and not self._window.has_ended(task.ordinal):
                self._remember(task)

    def _remember(self, task: TaskMessage) -> TaskMessage:
        if len(self._tasks) >= self._forget_at or task.fields.images:
            for ordinal in [o for o in self._tasks if self._window.has_ended(o)]:
                del self._tasks[ordinal]
            self._forget_at = max(_REMEMBERED, 2 * len(self._tasks))
        self._tasks[task.ordinal] = task
        return task

    @property
    def position(self) -> int:
        """Tasks taken from the tasksets so far."""
        return self._position

    def allowed(self) -> int:
        """Training tasks that may have been fed by now.

        Nothing is sampled for a rewarded call, so it waits for the batch that is next, and its gate is the lowest.
        """
        live, staleness = self._context.live, self._context.plan.staleness
        if live.version < 0:
            return 0
        if self._rewarded is not None:
            staleness = replace(staleness, offset=min(staleness.offset, 1))
        batches = min(staleness.open_batches(live.gate_step), self._context.last_step)
        return batches * self._context.plan.groups_per_step + self._window.lost

    def left(self) -> int:
        """Training tasks that will be fed until the run ends, without those already requested."""
        end = self._context.last_step * self._context.plan.groups_per_step + self._window.lost
        injected = sum(not waiting.stored.done() for waiting in self._injected)
        return max(0, end - self.fed - len(self._window.to_requeue) - injected)

    def gate(self, ordinal: int) -> int:
        """Lowest optimizer step whose weights may start a task that is fed now."""
        batch = (ordinal - 1 - self._window.lost) // self._context.plan.groups_per_step
        gate, origin = self._context.plan.staleness.gate(batch), self._context.origin
        return gate if origin is None else max(gate, origin.step)  # a fork has no older weights

    async def run(self) -> None:
        while True:
            await self._context.changed.wait_for(self._may_feed)
            while self._may_feed():
                async with self._storing:
                    await self._feed_next()
            await self._context.changed.notify()

    def _may_feed(self) -> bool:
        has_task = self._rewarded is None or self._rewarded.waiting or self._injected or self._window.to_requeue
        return bool(has_task) and self.fed < self.allowed() and not self.waits_for_room

    @property
    def waits_for_room(self) -> bool:
        """Returns True if tasks are deferred because the log may have no room for their groups.

        Those of one batch are always fed: a log that cannot hold them is of no use. Groups come in any order, so a task
        that is fed must fit, or the log could fill up with later groups than the next batch needs.
        """
        outstanding = self.fed - self._window.num_ended
        if self.fed >= self.allowed() or outstanding < self._context.plan.groups_per_step:
            return False
        plan = self._context.plan
        longest = plan.config.algorithm.repeat_times * plan.lengths.model * _BYTES_PER_TOKEN
        return not self._context.capacity.has_room_for(self.fed + 1, longest)

    async def clear(self) -> None:
        """Take dead and cut tasks out of the queue. The newest message stays until another is there, for its counts."""

        async def remove(ordinal: int) -> None:
            names = self._context.names
            with contextlib.suppress(NotFound):
                subject = names.task((await self.task(ordinal)).fields.taskset, ordinal)
                message = await self._newest(subject)
                if message is not None and message.sequence < self._sequence:
                    await self._context.broker.delete(names.tasks_stream, message.sequence)
                    self._tasks.pop(ordinal, None)

        while True:
            await self._context.changed.wait_for(lambda: bool(self._removable()))
            for ordinal in self._removable():
                await remove(ordinal)
                self._window.unqueued.discard(ordinal)

    def _removable(self) -> list[int]:
        return [ordinal for ordinal in self._window.unqueued if ordinal < self.fed]

    async def inject(self, tasks: list[Task]) -> "list[asyncio.Future[bool]]":
        """Feed a caller's tasks before the taskset's own; each resolves to False if it was there already."""
        await self.given.read()
        loop = asyncio.get_running_loop()
        added = [Waiting(task, loop.create_future()) for task in tasks]
        for waiting in added:
            if waiting.task.task_id in self.given:
                waiting.stored.set_result(False)
        # Without those whose caller is gone: as long as nothing is fed, none of them would leave.
        self._injected = deque(waiting for waiting in (*self._injected, *added) if not waiting.stored.done())
        await self._context.changed.notify()
        return [waiting.stored for waiting in added]

    async def join(self, name: str, weight: float, tasks: list[Task]) -> "list[asyncio.Future[bool]]":
        """Mix tasks of a joining explorer's taskset with the run's own; each resolves once it is fed."""
        stored = self.joined.add(name, weight, tasks)
        await self._context.changed.notify()
        return stored

    def outstanding(self) -> Iterable[int]:
        """Ordinals of tasks that were fed and have not ended."""
        return self._window.outstanding(self.fed)

    async def offer_again(self, ordinal: int) -> None:
        """Put a task that was fed before behind the others of the queue. NotFound if it is not there any more."""
        task = (await self.task(ordinal)).decoded()
        async with self._storing:
            await self._store(task, self._position, message_id=f"{task.task_id}/again/{self._sequence}")

    async def _feed_next(self) -> None:
        ordinal = self.fed + 1
        gate = self.gate(ordinal)
        if self._window.to_requeue:
            await self._feed_again(self._window.to_requeue[0], ordinal, gate)
            return
        while self._injected and self._is_over(self._injected[0]):
            self._injected.popleft()
        if not self._injected and (turn := self.joined.take()) is not None:
            await self._feed_given(turn[1], ordinal, gate, joined=turn[0])
            return
        if not self._injected and self._rewarded is not None:
            if (found := await self._rewarded.take(gate)) is not None:
                task = self._rewarded.task(found.reward, ordinal, gate)
                await self._store(task, self._position, rewarded=found.sequence)
                self._rewarded.through = found.sequence
            return
        if not self._injected:
            task = await asyncio.to_thread(self._source.train_task_later(self._position, ordinal, gate))
            await self._store(task, self._position + 1)
            self._position += 1
            return
        given = self._injected.popleft()
        await self._feed_given(given, ordinal, gate)
        self.given.add(given.task.task_id)

    def _is_over(self, waiting: Waiting) -> bool:
        """Returns True if the caller is gone, or another caller's task of the same id was fed meanwhile."""
        if waiting.task.task_id in self.given and not waiting.stored.done():
            waiting.stored.set_result(False)
        return waiting.stored.done()

    async def _feed_given(self, given: Waiting, ordinal: int, gate: int, joined: str = "") -> None:
        """Feed a task of a caller's, who hears whether it was stored now or before."""
        task = replace(given.task, run=self._context.run, ordinal=ordinal, gate_step=gate)
        positions = self.joined.advanced(joined)
        try:
            await self._store(task, self._position, joined=positions)
            fresh = True
        except SequenceConflict as error:
            if not error.stored_at:
                raise
            fresh = False
        self.joined.keep(positions)
        if not given.stored.done():
            given.stored.set_result(fresh)

    async def _feed_again(self, sequence: int, ordinal: int, gate: int) -> None:
        """Feed the dead task that the log entry requeues."""
        entry = await self._context.broker.get(self._context.names.experiences_stream, sequence)
        task = LogEntry.parse(entry.data).task.decoded()
        task = replace(task, ordinal=ordinal, gate_step=gate)
        message_id = f"{task.task_id}/requeue/{task.requeues}"
        await self._store(task, self._position, message_id=message_id, requeued_through=sequence)
        self._window.requeued_through = sequence
        log.info("buffer.task.requeued", task=task.task_id, ordinal=ordinal, dead_before=task.requeues)

    async def _store(
        self,
        task: Task,
        position: int,
        message_id: str = "",
        requeued_through: int = 0,
        joined: dict[str, int] | None = None,
        rewarded: int = 0,
    ) -> None:
        names, message = self._context.names, TaskMessage.of(task)
        requeued, fed = requeued_through or self._window.requeued_through, max(self.fed, task.ordinal)
        counts = {headers.POSITION: str(position), headers.FED: str(fed), headers.REQUEUED: str(requeued)}
        joined = self.joined.advanced("") if joined is None else joined
        if joined:
            counts[headers.JOINED] = JoinedTasksets.to_header(joined)
        if self._rewarded is not None:
            counts[headers.REWARDED] = str(rewarded or self._rewarded.through)
        data = message.encode()

        async def is_same(stored: StoredMessage) -> bool:
            found = task_in(self._context, stored) if is_fed(self._context, stored) else None
            return found is not None and found.fields.task_id == task.task_id

        with tracing.span("task.feed", task_id=task.task_id, ordinal=task.ordinal):
            self._sequence = await append_past_others(
                self._context.broker,
                names.task(task.taskset, task.ordinal),
                names.tasks_stream,
                lambda _: data,
                message_id=message_id or task.task_id,
                last_sequence=self._sequence,
                is_ours=self._is_fed,
                is_same=is_same,
                headers=tracing.inject(counts),
            )
            log.debug("buffer.task.fed", task=task.task_id, ordinal=task.ordinal)
        self._remember(message)
        self._context.fed = fed
        FED.set(self.fed)

    async def _is_fed(self, message: StoredMessage) -> bool:
        """Returns True for a task that a buffer of this run fed, unless it is a copy of an earlier one."""
        return is_fed(self._context, message) and int(message.headers[headers.FED]) >= self.fed


def task_in(context: RunContext, message: StoredMessage) -> TaskMessage | None:
    """The training task in a message of the queue; None if it holds none of this run under its own subject."""
    task = TaskMessage.parse(message.data)
    is_here = task is not None and message.subject == context.names.task(task.fields.taskset, task.ordinal)
    return task if task is not None and is_here and task.fields.run == context.run and task.is_training else None


def is_fed(context: RunContext, message: StoredMessage) -> bool:
    """Returns True if a buffer of this run fed the task: its counts are part of the message."""
    task, counts = task_in(context, message), [message.headers.get(name, "") for name in _COUNTS]
    if task is None or not all(map(_is_count, counts)):
        return False
    return 1 <= task.ordinal <= int(message.headers[headers.FED])


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) < _LONGEST_COUNT


async def newest_fed(context: RunContext) -> StoredMessage | None:
    """The task that was fed last, with the counts in its headers."""

    async def is_ours(message: StoredMessage) -> bool:
        return is_fed(context, message)

    return await newest_of_ours(context.broker, context.names.tasks_stream, is_ours)
