"""Leases tasks from the shared queue, renews leases while tasks run, and returns or acknowledges them at the end.

A task that waits for an absent provider is put aside: it keeps its lease, and its slot goes to the next task. Attempts
end when the buffer removes their task, such as a cut one, from the queue.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any

import structlog

from trinity.data.experience import Task
from trinity.data.wire import decode_task
from trinity.runtime.broker import Broker, Message, PullConsumer
from trinity.runtime.errors import InvalidInput, NotFound, PermissionDenied, Unavailable
from trinity.runtime.names import TASK_LEASE_SECONDS, TASKS_CONSUMER

log = structlog.get_logger(__name__)

_REQUEST_SECONDS = 2.0
_PAUSE_SECONDS = 0.5
_LOOK_SECONDS = 5.0
_BYTES_A_SECOND = 64 * 1024  # of the queue that an attempt may read, since a task's images may have some MiB
_LOOKS = 2  # a replica of the stream may be behind, and lack a task that was fed just now

_queue: ContextVar["TaskQueue | None"] = ContextVar("queue", default=None)

Work = Callable[[Task, Message], Awaitable[None]]
GiveBack = Callable[[Message], Awaitable[object]]


@contextlib.asynccontextmanager
async def aside() -> AsyncIterator[None]:
    """Free the slot of the running task while the body runs. Its lease is kept."""
    queue, task = _queue.get(), asyncio.current_task()
    if queue is None or task is None:
        yield
        return
    queue.set_aside(task)
    yield  # after a failure the task stays aside, since it no longer needs a slot
    await queue.take_back(task)


class TaskQueue:
    """Leases tasks of one stream, runs up to `slots` of them at once, and leases none while `pauses()` is true.

    `give_back` returns the lease of an unfinished task. `keep` is told which leases are held, at each change.
    """

    def __init__(
        self,
        broker: Broker,
        stream: str,
        slots: int,
        work: Work,
        pauses: Callable[[], bool] = lambda: False,
        give_back: GiveBack = Message.retry,
        keep: Callable[[str, Iterable[str]], None] = lambda stream, leases: None,
    ) -> None:
        self._broker = broker
        self._stream = stream
        self._free = asyncio.Semaphore(slots)
        self._slots = slots
        self._work = work
        self._pauses, self._give_back, self._keep = pauses, give_back, keep
        self._running: dict[asyncio.Task[None], Message] = {}
        self._left: list[Message] = []  # of tasks that failed, or were cancelled as another had failed
        self._aside: set[asyncio.Task[None]] = set()
        self._slot_freed = asyncio.Event()
        self._draining = False
        self._no_open_request = asyncio.Event()
        self._no_open_request.set()

    @property
    def running(self) -> int:
        """Number of tasks that have a slot or wait for the next."""
        return len(self._running) - len(self._aside)

    @property
    def waiting(self) -> int:
        """Number of tasks put aside."""
        return len(self._aside)

    def set_aside(self, task: "asyncio.Task[None]") -> None:
        self._aside.add(task)
        self._free.release()
        self._slot_freed.set()

    async def take_back(self, task: "asyncio.Task[None]") -> None:
        await self._free.acquire()
        self._aside.discard(task)

    async def run(self) -> None:
        """Lease tasks and run them until `drain`. Raises the first error of a task's work."""
        consumer = await self._open()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._no_open_request.clear()
        try:
            while not self._draining:
                if failed.done():
                    failed.result()
                room = self._slots - self.running
                if room <= 0:
                    await self._wait_for_slot(failed)
                    continue
                if self._pauses():
                    await asyncio.wait([failed], timeout=_PAUSE_SECONDS)
                    continue
                async for message in consumer.lease(room, _REQUEST_SECONDS):
                    if self._draining:
                        await self._give_back(message)
                        continue
                    self._begin(message, failed)
            self._no_open_request.set()
            await asyncio.Event().wait()
        finally:
            for running in self._running:
                running.cancel()
            await consumer.close()

    async def _open(self) -> PullConsumer:
        while True:
            with contextlib.suppress(Unavailable):
                return await PullConsumer.open(self._broker, self._stream, TASKS_CONSUMER)
            await asyncio.sleep(0.5)

    async def _wait_for_slot(self, failed: "asyncio.Future[None]") -> None:
        self._slot_freed.clear()
        freed: asyncio.Task[Any] = asyncio.create_task(self._slot_freed.wait())
        both: set[asyncio.Future[Any]] = {freed, failed}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            freed.cancel()

    def _begin(self, message: Message, failed: "asyncio.Future[None]") -> None:
        running = asyncio.create_task(self._handle(message))
        self._running[running] = message
        self._note_leases()

        def ended(task: asyncio.Task[None]) -> None:
            message = self._running.pop(task)
            if not self._draining and (task.cancelled() or task.exception() is not None):
                self._left.append(message)  # only the next process returns it
            self._note_leases()
            self._aside.discard(task)
            self._slot_freed.set()
            if not task.cancelled() and task.exception() is not None and not failed.done():
                failed.set_exception(task.exception())  # type: ignore[arg-type]

        running.add_done_callback(ended)

    def _note_leases(self) -> None:
        self._keep(self._stream, [message.lease for message in (*self._running.values(), *self._left)])

    async def _handle(self, message: Message) -> None:
        try:
            task = decode_task(message.data)
        except InvalidInput as error:
            log.error("explorer.task.unreadable", sequence=message.sequence, error=str(error))
            await message.ack()
            return
        async with _lease_heartbeat(message, self._note_leases):
            _queue.set(self)
            await self._free.acquire()
            try:
                await self._work(task, message)
            finally:
                if asyncio.current_task() not in self._aside:
                    self._free.release()

    async def drain(self, grace_seconds: float) -> tuple[int, int]:
        """Stop leasing, wait `grace_seconds` for running tasks and return the others. Returns (finished, returned)."""
        self._draining = True
        before = len(self._running)
        if busy := [task for task in self._running if task not in self._aside]:
            await asyncio.wait(busy, timeout=grace_seconds)
        # A task returned while a lease request is open would be delivered to that request again.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._no_open_request.wait(), _REQUEST_SECONDS + 1)
        left = list(self._running.items())
        for task, _ in left:
            task.cancel()
        await asyncio.gather(*(self._give_back(message) for _, message in left))
        return max(0, before - len(left)), len(left)


@contextlib.asynccontextmanager
async def _lease_heartbeat(message: Message, renewed: Callable[[], None]) -> AsyncIterator[None]:
    """Renew the lease of a message while the body runs. The first renewal tells the buffer that the message arrived."""

    async def extend() -> None:
        while True:
            if await message.extend():
                renewed()
            await asyncio.sleep(TASK_LEASE_SECONDS / 3)

    extending = asyncio.create_task(extend())
    try:
        yield
    finally:
        extending.cancel()


class TaskEnded(Exception):
    """The task was removed from the queue, so no step waits for its group."""


@contextlib.asynccontextmanager
async def while_queued(broker: Broker, stream: str, sequence: int) -> AsyncIterator[None]:
    """Run the body until the message leaves the queue, then cancel it and raise TaskEnded."""
    try:
        async with asyncio.timeout(None) as limit:
            watching = asyncio.create_task(_until_gone(broker, stream, sequence, limit))
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        if limit.expired():
            raise TaskEnded from None
        raise


async def _until_gone(broker: Broker, stream: str, sequence: int, limit: asyncio.Timeout) -> None:
    missed, seconds = 0, _LOOK_SECONDS
    while missed < _LOOKS:
        await asyncio.sleep(seconds)
        try:
            task = await broker.get(stream, sequence)
            missed, seconds = 0, max(_LOOK_SECONDS, len(task.data) / _BYTES_A_SECOND)
        except NotFound:
            missed += 1
        except Unavailable:
            continue
        except PermissionDenied as error:  # identities of an earlier release lack this permission
            log.info("explorer.queue.unreadable", reason=str(error))
            return
    limit.reschedule(asyncio.get_running_loop().time())
