"""Leases tasks from the shared queue, renews leases while tasks run, and returns or acknowledges them at the end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog
from google.protobuf.message import DecodeError

from trinity.api.common.v1 import task_pb2
from trinity.data.experience import Task
from trinity.data.wire import task_from_proto
from trinity.runtime.broker import Broker, Message, PullConsumer
from trinity.runtime.errors import InvalidInput, Unavailable
from trinity.runtime.names import TASKS_CONSUMER

log = structlog.get_logger(__name__)

LEASE_SECONDS = 30.0
_MAX_LEASES = 100_000
_REQUEST_SECONDS = 2.0
_PAUSE_SECONDS = 0.5

Work = Callable[[Task, Message], Awaitable[None]]


class TaskQueue:
    """Leases tasks of one stream, runs up to `slots` of them at once, and leases none while `pauses()` is true."""

    def __init__(
        self, broker: Broker, stream: str, slots: int, work: Work, pauses: Callable[[], bool] = lambda: False
    ) -> None:
        self._broker = broker
        self._stream = stream
        self._free = asyncio.Semaphore(slots)
        self._slots = slots
        self._work = work
        self._pauses = pauses
        self._running: dict[asyncio.Task[None], Message] = {}
        self._draining = False
        self._no_open_request = asyncio.Event()
        self._no_open_request.set()
        self.handed_back = 0

    @property
    def running(self) -> int:
        return len(self._running)

    async def run(self) -> None:
        """Lease tasks and run them until `drain`. Raises what a task's work raised."""
        consumer = await self._open()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._no_open_request.clear()
        try:
            while not self._draining:
                if failed.done():
                    failed.result()
                if self._free.locked():
                    await self._wait_for_any(failed)
                    continue
                if self._pauses():
                    await asyncio.wait([failed], timeout=_PAUSE_SECONDS)
                    continue
                async for message in consumer.lease(self._slots - self.running, _REQUEST_SECONDS):
                    if self._draining:
                        await message.retry()
                        continue
                    await self._free.acquire()
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
                return await PullConsumer.open(
                    self._broker, self._stream, TASKS_CONSUMER, lease_seconds=LEASE_SECONDS, max_leases=_MAX_LEASES
                )
            await asyncio.sleep(0.5)

    async def _wait_for_any(self, failed: "asyncio.Future[None]") -> None:
        await asyncio.wait([*self._running, failed], return_when=asyncio.FIRST_COMPLETED)

    def _begin(self, message: Message, failed: "asyncio.Future[None]") -> None:
        running = asyncio.create_task(self._handle(message))
        self._running[running] = message

        def ended(task: asyncio.Task[None]) -> None:
            del self._running[task]
            self._free.release()
            if not task.cancelled() and task.exception() is not None and not failed.done():
                failed.set_exception(task.exception())  # type: ignore[arg-type]

        running.add_done_callback(ended)

    async def _handle(self, message: Message) -> None:
        try:
            task = task_from_proto(task_pb2.Task.FromString(message.data))
        except (DecodeError, InvalidInput) as error:
            log.error("explorer.task.unreadable", sequence=message.sequence, error=str(error))
            await message.ack()
            return
        async with _lease_heartbeat(message):
            await self._work(task, message)

    async def drain(self, grace_seconds: float) -> int:
        """Stop leasing, wait `grace_seconds` for running tasks, return the rest. Gives how many finished."""
        self._draining = True
        before = self.running
        if self._running:
            await asyncio.wait(list(self._running), timeout=grace_seconds)
        # A task returned while a lease request is open would be delivered to that request again.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._no_open_request.wait(), _REQUEST_SECONDS + 1)
        left = list(self._running.items())
        for task, message in left:
            task.cancel()
            await message.retry()
        self.handed_back = len(left)
        return max(0, before - len(left))


@contextlib.asynccontextmanager
async def _lease_heartbeat(message: Message) -> AsyncIterator[None]:
    """Renew the lease of a message while the body runs."""

    async def extend() -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            await message.extend()

    extending = asyncio.create_task(extend())
    try:
        yield
    finally:
        extending.cancel()
