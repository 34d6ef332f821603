"""Evaluations: every row of every evaluation taskset, once for a version that is due, beside the training tasks."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import structlog
from google.protobuf.message import DecodeError

from trinity.api.common.v1 import experience_pb2, task_pb2
from trinity.buffer.evaluation.tally import Tally
from trinity.buffer.log.reader import check_owner, whole_outcome
from trinity.buffer.state.context import RunContext
from trinity.buffer.state.streams import append_past_others, newest_of_ours
from trinity.data.experience import AttemptFailure, Group, Outcome, Task, TaskKind
from trinity.data.task_source import TaskSource
from trinity.data.wire import outcome_from_proto, task_from_proto, task_to_proto
from trinity.runtime import headers, tracing
from trinity.runtime.broker import Message, StoredMessage, tail
from trinity.runtime.errors import FailureCause, InvalidInput, NotFound

log = structlog.get_logger(__name__)

_LONGEST_MARK = 16  # digits


class Evaluator:
    """Feeds evaluation tasks and tallies their results. State is in the two streams alone."""

    def __init__(
        self, context: RunContext, sources: list[TaskSource], on_complete: Callable[[Tally], None] = lambda _: None
    ) -> None:
        self._context = context
        self._on_complete = on_complete
        self._sources = sources
        self._rows = [(source, row) for source in sources for row in range(len(source.rows))]
        self._fed = 0
        self._step = self._recovered = -1
        self._index = 0
        self._storing = asyncio.Lock()
        self.read_through = 0  # sequence of the newest result that was read
        self.tallies: dict[tuple[int, str], Tally] = {}
        self.tokens = 0

    @property
    def outstanding(self) -> int:
        return sum(t.expected - len(t.ended) for t in self.tallies.values())

    @property
    def idle(self) -> bool:
        """Nothing is due, nothing is running."""
        return not self._rows or (self._index == 0 and self._due() is None and self.outstanding == 0)

    async def recover(self) -> None:
        """Read from the stream which evaluation was fed last, and how far."""
        names = self._context.names
        self._fed = (await self._context.broker.state(names.evaluation_tasks_stream)).last_sequence
        newest = await newest_of_ours(self._context.broker, names.evaluation_tasks_stream, self._is_fed)
        if newest is not None and self._rows:
            self._step = self._recovered = int(newest.headers[headers.EVALUATION_STEP])
            self._index = (int(newest.headers[headers.EVALUATION_INDEX]) + 1) % len(self._rows)
            for source in self._sources:
                self._tally(self._step, source.taskset.name)

    def _due(self) -> int | None:
        """The step to evaluate now, if any: the LIVE one, when an interval, the start or the end was reached."""
        config = self._context.plan.config
        live, explorer = self._context.live_step, config.explorer
        if live < 0 or live <= self._step:
            return None
        if live == 0:
            return 0 if explorer.eval_on_startup else None
        if config.mode == "bench":
            return live
        crossed = live // explorer.eval_interval > max(self._step, 0) // explorer.eval_interval
        return live if crossed or live >= self._context.last_step else None

    async def feed(self) -> None:
        if not self._rows:
            return
        while True:
            await self._context.changed.wait_for(lambda: self._index > 0 or self._due() is not None)
            if self._index == 0:
                self._step = self._due() or 0
                log.info("buffer.evaluation.begun", step=self._step, tasks=len(self._rows))
            for index in range(self._index, len(self._rows)):
                async with self._storing:
                    await self._feed_one(index)
            self._index = 0
            await self._context.changed.notify()

    def unreported(self) -> Iterable[tuple[int, int]]:
        """(step, row) of tasks without a result, once all of the newest evaluation are fed."""
        if self._index:
            return
        for index, (source, row) in enumerate(self._rows):
            tally = self.tallies.get((self._step, source.taskset.name))
            if tally is not None and source.evaluation_id(row, self._step) not in tally.ended:
                yield self._step, index

    async def offer_again(self, task: tuple[int, int]) -> None:
        """Put a task of `unreported` behind the others of the queue."""
        async with self._storing:
            if self._index == 0 and task[0] == self._step:
                await self._store(task[1], again=True)

    async def _feed_one(self, index: int) -> None:
        await self._store(index)
        self._index = index + 1

    async def _store(self, index: int, again: bool = False) -> None:
        source, row = self._rows[index]
        names = self._context.names
        task = await asyncio.to_thread(source.evaluation_task, row, self._fed + 1, self._step)
        self._tally(task.evaluation_step, task.taskset)

        def data(sequence: int) -> bytes:
            return task_to_proto(replace(task, ordinal=sequence)).SerializeToString()

        newest = len(self._rows) - 1 if again else index
        marks = {headers.EVALUATION_STEP: str(self._step), headers.EVALUATION_INDEX: str(newest)}
        with tracing.span("evaluation.feed", task_id=task.task_id):
            self._fed = await append_past_others(
                self._context.broker,
                names.evaluation_task(task.taskset),
                names.evaluation_tasks_stream,
                data,
                message_id=f"{task.task_id}/again/{self._fed}" if again else task.task_id,
                last_sequence=self._fed,
                is_ours=self._is_fed,
                headers=tracing.inject(marks),
            )

    def _tally(self, step: int, taskset: str) -> Tally:
        expected = sum(len(s.rows) for s in self._sources if s.taskset.name == taskset)
        return self.tallies.setdefault((step, taskset), Tally(step, taskset, expected))

    async def _is_fed(self, message: StoredMessage) -> bool:
        """Whether it is a task that a buffer of this run fed."""
        marks = [message.headers.get(name, "") for name in (headers.EVALUATION_STEP, headers.EVALUATION_INDEX)]
        task = _task_in(message.data)
        is_here = message.subject == self._context.names.evaluation_task(task.taskset) and task.run == self._context.run
        return is_here and all(mark.isdecimal() and len(mark) < _LONGEST_MARK for mark in marks)

    async def _read(self, message: Message) -> Outcome | None:
        """A result; one that cannot be used is a failure of its task for good; None if it is of no task."""
        found = experience_pb2.Outcome()
        try:
            found, _ = await whole_outcome(self._context, message.subject, message.data)
            outcome = outcome_from_proto(found)
            check_owner(self._context.names, message.subject, found)
            await self._check_fed(outcome.task)
            if isinstance(outcome, Group):
                outcome.check(replace(self._context.limits, teacher=False))
            return outcome
        except InvalidInput as error:
            log.warning("buffer.evaluation.refused", sequence=message.sequence, reason=str(error))
            kind, cause = found.WhichOneof("outcome"), FailureCause.INVALID_EXPERIENCE
            with contextlib.suppress(InvalidInput):
                task = task_from_proto(getattr(found, kind).task if kind in ("group", "failure") else task_pb2.Task())
                await self._check_fed(task)
                return AttemptFailure(task, 1, "", cause, str(error), True, time.time())
            return None

    async def _check_fed(self, task: Task) -> None:
        """Raises InvalidInput unless the task is one of an evaluation that was fed."""
        source = next((s for s in self._sources if s.taskset.name == task.taskset), None)
        if task.run != self._context.run or task.kind is not TaskKind.EVALUATION or source is None:
            raise InvalidInput("task", f"{task.task_id[:80]!r} is of no evaluation of this run")
        step = task.evaluation_step
        if not 0 <= task.row < len(source.rows) or task.task_id != source.evaluation_id(task.row, step):
            raise InvalidInput("task.task_id", f"is {task.task_id[:80]!r}; no such task was fed")
        if (step, task.taskset) in self.tallies:
            return
        stream = self._context.names.evaluation_tasks_stream  # fed by an earlier process
        with contextlib.suppress(NotFound):
            fed = _task_in((await self._context.broker.get(stream, max(1, task.ordinal))).data)
            if (fed.run, fed.task_id) == (task.run, task.task_id):
                return
        raise InvalidInput("task.evaluation_step", f"is {step}; no such evaluation was fed")

    async def collect(self) -> None:
        """Follow the results from the first one."""
        async for message in tail(self._context.broker, self._context.names.evaluations_stream, 0):
            outcome = await self._read(message)
            self.read_through = message.sequence
            if outcome is None:
                continue
            tally = self._tally(outcome.task.evaluation_step, outcome.task.taskset)
            was_complete = tally.complete
            if isinstance(outcome, Group):
                tally.add(outcome)
                self.tokens += outcome.sampled_tokens
            else:
                tally.fail(outcome)
            if tally.complete and not was_complete:
                log.info("buffer.evaluation.done", step=tally.step, taskset=tally.taskset, **tally.metrics())
                if tally.step >= self._recovered:  # earlier ones were reported before a restart
                    self._on_complete(tally)
                await self._context.changed.notify()


def _task_in(data: bytes) -> task_pb2.Task:
    """The task in a message; an empty one if there is none."""
    try:
        return task_pb2.Task.FromString(data)
    except DecodeError:
        return task_pb2.Task()
