"""Messages that wait to be sent over one stream. All of them go out as one batch."""

import asyncio
from collections.abc import Iterator
from typing import Generic, TypeVar

from google.protobuf.message import Message

T = TypeVar("T", bound=Message)
# gRPC receives 4 MiB at once by default; a single text may have one.
MAX_BATCH_BYTES = 1024 * 1024


class Outbox(Generic[T]):
    """Holds messages until they are sent. The caller of `put` bounds their number."""

    def __init__(self) -> None:
        self._messages: list[T] = []
        self._some = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._messages)

    def close(self) -> None:
        """Drops waiting messages and accepts no more."""
        self._closed = True
        self._messages.clear()
        self._some.set()

    def put(self, message: T) -> None:
        """Queues a message. Does nothing after `close`."""
        if self._closed:
            return
        self._messages.append(message)
        self._some.set()

    async def batches(self) -> list[list[T]]:
        """Waits for a message and returns all waiting ones in batches of limited size; none after `close`."""
        await self._some.wait()
        if self._closed:
            return []
        self._some.clear()
        messages, self._messages = self._messages, []
        return list(_split(messages))


def _split(messages: list[T]) -> Iterator[list[T]]:
    batch: list[T] = []
    size = 0
    for message in messages:
        length = message.ByteSize()
        if batch and size + length > MAX_BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += length
    if batch:
        yield batch
