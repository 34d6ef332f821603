"""The explorer's core: lease a task, wait for its gate, explore it, store the outcome, acknowledge the task.

A task is acknowledged only after JetStream has acknowledged its outcome. Whatever happens in between, the task is
attempted again elsewhere, and the log's deduplication keeps the first group. Attempts at a task that was cut end.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Protocol

import structlog

from trinity.data.experience import Group, Outcome, Task, TaskKind
from trinity.data.wire import decode_task
from trinity.explorer.rollout import task_queue
from trinity.explorer.rollout.account import Account, Attempt
from trinity.explorer.rollout.attempt import store
from trinity.explorer.rollout.still_queued import TaskEnded, while_queued
from trinity.explorer.rollout.task_queue import TaskQueue
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


class Gates(Protocol):
    """The part of weights.gates.Gates that the loop needs."""

    @property
    def falls_short(self) -> bool: ...
    async def reaches_step(self, step: int) -> bool: ...


@dataclass
class Progress:
    """What this explorer does now, and has done since it started."""

    running_tasks: int = 0  # leased, and their gate is met
    evaluations: int = 0  # of these
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
    ) -> None:
        self._broker, self._run = broker, run
        self._explore = explore
        self._gates, self._notify = gates, notify
        self._progress = progress
        self._note_return = note_return
        self._queues = [
            TaskQueue(broker, stream, slots, self.work, lambda: gates.falls_short, self._give_back)
            for stream in (run.evaluation_tasks_stream, run.tasks_stream)
        ]

    async def run(self) -> None:
        """Lease tasks and work on them until `drain`. Raises what the work on a task raised."""
        async with asyncio.TaskGroup() as group:
            for queue in self._queues:
                group.create_task(queue.run())

    async def work(self, task: Task, message: Message) -> None:
        """Work on a leased task."""
        progress = self._progress
        if not await self._gates.reaches_step(task.gate_step):
            log.warning("explorer.task.returned", task=task.task_id, gate_step=task.gate_step, reason="no weights")
            await self._give_back(message, _RETURN_SECONDS)
            return
        share, outcome, was_cut = progress.account.attempt(task), None, False
        await self._count(task, +1)
        progress.account.enter(share)
        try:
            with tracing.span("task.attempt", parent=tracing.extract(message.headers)):
                async with self._while_queued(task, message):
                    outcome = await self._explore(task, message.deliveries, aside=partial(self._aside, task, share))
                    receipt = await store(self._broker, self._run, outcome, self._note_room)
                if isinstance(outcome, Group):
                    told = {"task": task.task_id, "ordinal": task.ordinal, "kind": str(task.kind), **asdict(receipt)}
                    log.debug("explorer.group.stored", **told)
        except TaskEnded:
            outcome, was_cut = None, True
        finally:
            progress.account.leave(share)
            progress.account.end(share, task, outcome, was_cut)
            await self._count(task, -1)
        if outcome is None:
            log.info("explorer.attempt.abandoned", task=task.task_id, attempt=message.deliveries, reason="task was cut")
            await message.retry(_RETURN_SECONDS)  # what is gone from the queue is not delivered again
            return
        if isinstance(outcome, Group):
            progress.groups_stored += 1
        else:
            progress.failed_attempts += 1
        if isinstance(outcome, Group) or outcome.final:
            await message.ack()
        else:
            await message.retry(_RETRY_SECONDS * message.deliveries)

    async def _give_back(self, message: Message, delay_seconds: float = 0.0) -> None:
        """Return a lease that was no attempt at its task."""
        if self._note_return is not None:
            with contextlib.suppress(InvalidInput):  # else it is no task
                await self._note_return(decode_task(message.data), message.deliveries)
        await message.retry(delay_seconds)

    def _while_queued(self, task: Task, message: Message) -> AbstractAsyncContextManager[None]:
        if task.kind is TaskKind.EVALUATION:
            return contextlib.nullcontext()  # none is taken out of their queue
        return while_queued(self._broker, self._run.tasks_stream, message.sequence)

    async def _count(self, task: Task, change: int) -> None:
        """Newer weights wait while an evaluation runs, so the follower hears of its begin and end. An evaluation
        that waits, for its gate or a provider, is not counted: newer weights may come meanwhile."""
        self._progress.running_tasks += change
        self._progress.evaluations += change * (task.kind is TaskKind.EVALUATION)
        await self._notify()

    @contextlib.asynccontextmanager
    async def _aside(self, task: Task, share: Attempt) -> AsyncIterator[None]:
        """The task waits for a provider that is away, and its slot is free for others."""
        self._progress.waiting_tasks += 1
        self._progress.account.leave(share)
        await self._count(task, -1)
        try:
            async with task_queue.aside():
                yield
        finally:
            self._progress.waiting_tasks -= 1
            self._progress.account.enter(share)
            await self._count(task, +1)

    def _note_room(self, waits: bool) -> None:
        self._progress.waits_for_log = waits

    async def drain(self, grace_seconds: float) -> tuple[int, int]:
        """(finished tasks, returned tasks)."""
        drained = await asyncio.gather(*(queue.drain(grace_seconds) for queue in self._queues))
        return sum(finished for finished, _ in drained), sum(returned for _, returned in drained)
