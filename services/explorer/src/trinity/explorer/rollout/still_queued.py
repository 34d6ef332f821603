"""An attempt ends when its task is gone from the queue: the buffer removes tasks that have ended, such as cut ones."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from trinity.runtime.broker import Broker
from trinity.runtime.errors import NotFound, PermissionDenied, Unavailable

log = structlog.get_logger(__name__)

_LOOK_SECONDS = 5.0
_BYTES_A_SECOND = 64 * 1024  # that an attempt reads for it: a task may have images of some MiB
# A replica of the stream may be behind, and lack a task that was fed just now.
_LOOKS = 2


class TaskEnded(Exception):
    """The task is not in the queue any more: no step waits for its group."""


@contextlib.asynccontextmanager
async def while_queued(broker: Broker, stream: str, sequence: int) -> AsyncIterator[None]:
    """Run the body while a message of the queue is there. Else cancel it and raise TaskEnded."""
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
        except PermissionDenied as error:  # an identity that an earlier release issued
            log.info("explorer.queue.not_read", reason=str(error))
            return
    limit.reschedule(asyncio.get_running_loop().time())
