"""The explorer's core: lease a task, wait for its gate, explore it, store the outcome, acknowledge the task.

A task is acknowledged only after JetStream has acknowledged its outcome. If the explorer dies in between, the task is
attempted again elsewhere, and the log's deduplication keeps the first group. Attempts end when their task is cut.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial

import structlog

from trinity.data.experience import Group, Outcome, Task, TaskKind
from trinity.data.wire import decode_task
from trinity.explorer.rollout import task_queue
from trinity.explorer.rollout.account import Account, Attempt, fate_of
from trinity.explorer.rollout.attempt import store
from trinity.explorer.rollout.leases import Leases
from trinity.explorer.rollout.task_queue import TaskEnded, TaskQueue, while_queued
from trinity.explorer.weights.choice import Gates
from trinity.runtime import tracing
from trinity.runtime.broker import Broker, Message
from trinity.runtime.errors import InvalidInput
from trinity.runtime.names import RunNames

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 1.0  # times the number of deliveries
# Longer than a request for tasks is open, so that a returned task does not come straight back.
_RETURN_SECONDS = 3.0

Explore = Callable[..., Awaitable[Outcome]]  # attempt.explore: the task, its deliveries, and `aside`
NoteReturn = Callable[[Task, int], Awaitable[None]]


@dataclass
class Progress:
    """Counters of this explorer's current and past work."""

    running_tasks: int = 0  # leased, with an open gate
    evaluations: int = 0  # among the running tasks
    waiting_tasks: int = 0  # for a provider that is away
    groups_stored: int = 0
    failed_attempts: int = 0
    waits_for_log: bool = False  # the log has no room
    draining: bool = False
    account: Account = field(default_factory=Account)


class RolloutLoop:
    """Works on up to `slots` tasks at once, and on as many evaluation tasks.

    `notify` is called when the explorer may have become busy or idle, `note_return` with a task and its deliveries
    before its lease is given back.
    """

    def __init__(
        self,
        broker: Broker,
        run: RunNames,
        slots: int,
        explore: Explore,
        gates: Gates,
        notify: Callable[[], Awaitable[None]],
        progress: Progress,
        note_return: NoteReturn | None = None,
        leases: Leases | None = None,
    ) -> None:
        self._broker, self._run = broker, run
        self._explore = explore
        self._gates, self._notify = gates, notify
        self._progress = progress
        self._note_return = note_return
        leases = leases or Leases(None, "")
        self._queues = [
            TaskQueue(broker, stream, slots, self.work, lambda: gates.falls_short, self._give_back, leases.keep)
            for stream in (run.evaluation_tasks_stream, run.tasks_stream)
        ]

    async def run(self) -> None:
        """Lease tasks and work on them until `drain`. Raises the first error of the work on a task."""
        async with asyncio.TaskGroup() as group:
            for queue in self._queues:
                group.create_task(queue.run())

    async def work(self, task: Task, message: Message) -> None:
        """Work on a leased task."""
        if not await self._gates.reaches_step(task.gate_step):
            log.warning("explorer.task.returned", task=task.task_id, gate_step=task.gate_step, reason="no weights")
            await self._give_back(message, _RETURN_SECONDS)
            return
        try:
            async with self._counted(task) as attempt:
                outcome = await self._explore_and_store(task, message, attempt)
        except TaskEnded:
            log.info("explorer.attempt.abandoned", task=task.task_id, attempt=message.deliveries, reason="task was cut")
            await message.retry(_RETURN_SECONDS)  # a task that is gone from the queue is not delivered again
            return
        if isinstance(outcome, Group):
            self._progress.groups_stored += 1
        else:
            self._progress.failed_attempts += 1
        if isinstance(outcome, Group) or outcome.final:
            await message.ack()
        else:
            await message.retry(_RETRY_SECONDS * message.deliveries)

    async def _explore_and_store(self, task: Task, message: Message, attempt: Attempt) -> Outcome:
        """Raises TaskEnded once the task is cut. Evaluations are never cut."""
        may_end = task.kind is not TaskKind.EVALUATION
        queued = while_queued(self._broker, self._run.tasks_stream, message.sequence) if may_end else nullcontext()
        with tracing.span("task.attempt", parent=tracing.extract(message.headers)):
            async with queued:
                outcome = await self._explore(task, message.deliveries, aside=partial(self._aside, task, attempt))
                attempt.fate = fate_of(task, outcome)
                receipt = await store(self._broker, self._run, outcome, self._note_room)
            if isinstance(outcome, Group):
                told = {"task": task.task_id, "ordinal": task.ordinal, "kind": str(task.kind), **asdict(receipt)}
                log.debug("explorer.group.stored", **told)
        return outcome

    @contextlib.asynccontextmanager
    async def _counted(self, task: Task) -> AsyncIterator[Attempt]:
        """The task counts as running in the body, and the body's seconds are charged to the attempt's fate."""
        account = self._progress.account
        attempt = account.attempt(task)
        self._enter(task, attempt)
        try:
            await self._notify()
            yield attempt
        except TaskEnded:
            attempt.fate = "cut"
            raise
        finally:
            self._leave(task, attempt)
            account.end(attempt)
            await self._notify()

    def _enter(self, task: Task, attempt: Attempt) -> None:
        self._progress.account.enter(attempt)
        self._progress.running_tasks += 1
        self._progress.evaluations += task.kind is TaskKind.EVALUATION

    def _leave(self, task: Task, attempt: Attempt) -> None:
        self._progress.account.leave(attempt)
        self._progress.running_tasks -= 1
        self._progress.evaluations -= task.kind is TaskKind.EVALUATION

    @contextlib.asynccontextmanager
    async def _aside(self, task: Task, attempt: Attempt) -> AsyncIterator[None]:
        """The task waits for a provider that is away. It does not count as running, and its slot is free for others."""
        self._progress.waiting_tasks += 1
        self._leave(task, attempt)
        try:
            await self._notify()
            async with task_queue.aside():
                yield
        finally:
            self._progress.waiting_tasks -= 1
            self._enter(task, attempt)
            await self._notify()

    async def _give_back(self, message: Message, delay_seconds: float = 0.0) -> None:
        """Return a lease without counting an attempt."""
        if self._note_return is not None:
            with contextlib.suppress(InvalidInput):  # an unreadable message is not noted
                await self._note_return(decode_task(message.data), message.deliveries)
        await message.retry(delay_seconds)

    def _note_room(self, waits: bool) -> None:
        self._progress.waits_for_log = waits

    async def drain(self, grace_seconds: float) -> tuple[int, int]:
        """Returns (finished tasks, returned tasks)."""
        drained = await asyncio.gather(*(queue.drain(grace_seconds) for queue in self._queues))
        return sum(finished for finished, _ in drained), sum(returned for _, returned in drained)
