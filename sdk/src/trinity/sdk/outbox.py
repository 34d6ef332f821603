"""Messages on their way over one stream: whatever has gathered goes out as one batch."""

import asyncio
from collections.abc import Iterator
from typing import Generic, TypeVar

from google.protobuf.message import Message

T = TypeVar("T", bound=Message)
# gRPC receives 4 MiB at once unless it is told otherwise; one text alone may have one.
MAX_BATCH_BYTES = 1024 * 1024


class Outbox(Generic[T]):
    """A side has at most one message of each open call in it, and closes: whoever puts these bounds their number."""

    def __init__(self) -> None:
        self._messages: list[T] = []
        self._some = asyncio.Event()
        self._shut = False

    def __len__(self) -> int:
        return len(self._messages)

    def shut(self) -> None:
        """Nothing more will go out."""
        self._shut = True
        self._messages.clear()
        self._some.set()

    def put(self, message: T) -> None:
        """Does nothing once it is shut."""
        if self._shut:
            return
        self._messages.append(message)
        self._some.set()

    async def batches(self) -> list[list[T]]:
        """Waits for the first message; then all there are, in batches that are not too long. None once it is shut."""
        await self._some.wait()
        if self._shut:
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
