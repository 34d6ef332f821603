"""Offers tasks again that were acknowledged without a result; otherwise the run would wait for them for ever.

An explorer acknowledges a task when its result is in the log. An earlier acknowledgement, by a fault or on purpose,
removes the task from the queue, and NATS does not name the explorer. Such a task is found when the queue is empty, no
task is leased, and the whole log is read. The log drops a second result of a task.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import TypeVar

import structlog

from trinity.buffer.state.context import RunContext
from trinity.runtime import names
from trinity.runtime.errors import NotFound, Unavailable
from trinity.runtime.metrics import Counter

log = structlog.get_logger(__name__)

OFFERED_AGAIN = Counter("trinity_buffer_tasks_unreported_total", "Tasks acknowledged without a result, offered again")

_LOOKS = 6
_Task = TypeVar("_Task", bound=Hashable)


async def offer_unreported(
    context: RunContext,
    seconds: float,
    tasks_stream: str,
    results_stream: str,
    read_through: Callable[[], int],
    outstanding: Callable[[], Iterable[_Task]],
    offer_again: Callable[[_Task], Awaitable[None]],
) -> None:
    """Offers outstanding tasks again, for ever, once no explorer had them for `seconds`."""
    looks: dict[_Task, int] = {}
    while True:
        await asyncio.sleep(seconds / _LOOKS)
        fed = set(outstanding())  # before the look at the queue, which then holds later tasks
        broker = context.broker
        with contextlib.suppress(NotFound, Unavailable):  # repeated later
            queue = await broker.consumer(tasks_stream, names.TASKS_CONSUMER)
            newest = (await broker.state(results_stream)).last_sequence
            is_idle = not queue.queued and not queue.leased and read_through() >= newest
            lost = fed.intersection(outstanding()) if is_idle else set()
            looks = {task: looks.get(task, 0) + 1 for task in lost}
            for task in [task for task, count in looks.items() if count >= _LOOKS]:
                await offer_again(task)
                del looks[task]
                OFFERED_AGAIN.inc()
                log.warning("buffer.task.unreported", task=str(task), reason="acknowledged without a result")
