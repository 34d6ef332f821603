"""Ids of the tasks that callers give to the run (PublishTasks), so that a repeated task is not fed again.

NATS knows an id for two minutes, and an ended task leaves the queue. After a restart, ledger and dead letters say which
ids there were.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from trinity.buffer.log.dead_letters import letter_in
from trinity.buffer.state.context import RunContext
from trinity.buffer.window.window import Window
from trinity.data.traffic import TASKSET
from trinity.data.wire import decode_task, parse_outcome
from trinity.runtime.broker import on_subject
from trinity.runtime.errors import InvalidInput

_READ_AHEAD = 256


class GivenIds:
    """`read` before the first `in`. `in_ledger`: the ids of all tasks that the ledger names."""

    def __init__(
        self, context: RunContext, window: Callable[[], Window], in_ledger: Callable[[], Awaitable[set[str]]]
    ) -> None:
        self._context = context
        self._window_of = window
        self._in_ledger = in_ledger
        own = [taskset.name for taskset in context.plan.tasksets] or [TASKSET]
        self._own = tuple(f"{name}/" for name in own)
        self._ids: set[str] = set()
        self._is_read = False
        self._reading = asyncio.Lock()

    def is_own(self, task_id: str) -> bool:
        """Returns True for an id reserved for the run's own tasksets."""
        return task_id.startswith(self._own)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._ids

    def add(self, task_id: str) -> None:
        self._ids.add(task_id)

    async def read(self) -> None:
        """Reads the ids from the streams of the run, once."""
        async with self._reading:
            if not self._is_read:
                self._ids |= {task_id for task_id in await self._stored() if not self.is_own(task_id)}
                self._is_read = True

    async def _stored(self) -> set[str]:
        """In the order in which a task goes from place to place, so that none is missed on its way."""
        broker, names, window = self._context.broker, self._context.names, self._window_of()
        newest = (await broker.state(names.experiences_stream)).last_sequence
        await self._context.changed.wait_for(lambda: window.log_sequence >= newest)  # after a restart
        found = set()
        async for message in on_subject(broker, names.tasks_stream, names.subjects("tasks"), read_ahead=_READ_AHEAD):
            with contextlib.suppress(InvalidInput):
                found.add(decode_task(message.data).task_id)
        found |= {group.task_id for group in (*window.unused.values(), *window.reusable.values())}
        found |= {drop.task_id for drop in window.fresh_drops}
        found |= await self._in_ledger()
        letters = names.subjects("deadletters")
        async for message in on_subject(broker, names.dead_letters_stream, letters, read_ahead=_READ_AHEAD):
            if (letter := letter_in(names, message)) is not None:
                found.add(letter.fields.task.task_id)
        for sequence in window.to_requeue:
            entry = await broker.get(names.experiences_stream, sequence)
            found.add(parse_outcome(entry.data).requeue.task.task_id)
        return found
