"""Payloads above the broker's message limit: stored in chunks, fetched with many requests in flight.

A chunk is an ordinary message. The reference has a checksum of the whole, so damaged payloads raise an error.
"""

import asyncio
import hashlib
import re
import zlib
from collections.abc import Callable

from trinity.runtime.broker.connection import Broker, new_message_id
from trinity.runtime.errors import InvalidInput
from trinity.runtime.names import BlobReference, RunNames
from trinity.runtime.rpc import MAX_MESSAGE_BYTES

CHUNK_BYTES = 512 * 1024
# A stored group travels to the trainer in one message of its batch, together with a few fields.
LARGEST_BYTES = MAX_MESSAGE_BYTES - 64 * 1024
_IN_FLIGHT = 16
_KEY = re.compile(r"[0-9a-f]{32}")


async def store(
    broker: Broker,
    names: RunNames,
    owner: str,
    data: bytes,
    on_refused: Callable[[str], None] | None = None,
    message_id: str = "",
) -> BlobReference:
    """Store `data` under a key derived from its content. Raises as Broker.publish does.

    Repeated with the same `message_id`, it stores only the chunks that are not there yet.
    """
    message_id = message_id or new_message_id()
    key = hashlib.sha256(data).hexdigest()[:32]
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    gate = asyncio.Semaphore(_IN_FLIGHT)

    async def put(index: int, chunk: bytes) -> None:
        async with gate:
            subject = names.blob(owner, key, index)
            await broker.publish(subject, chunk, message_id=f"{message_id}/{index}", on_refused=on_refused)

    await asyncio.gather(*(put(index, chunk) for index, chunk in enumerate(chunks)))
    return BlobReference(key=key, size_bytes=len(data), chunks=len(chunks), crc32=zlib.crc32(data))


async def fetch(broker: Broker, names: RunNames, owner: str, reference: BlobReference) -> bytes:
    """The payload of a reference. NotFound if a chunk is gone; InvalidInput if it is not what the reference says."""
    check(reference)
    gate = asyncio.Semaphore(_IN_FLIGHT)

    async def get(index: int) -> bytes:
        async with gate:
            return (await broker.last(names.blobs_stream, names.blob(owner, reference.key, index))).data

    data = b"".join(await asyncio.gather(*(get(index) for index in range(reference.chunks))))
    if len(data) != reference.size_bytes or zlib.crc32(data) != reference.crc32:
        problem = f"{reference.key} has {len(data)} bytes and another checksum than its reference says"
        raise InvalidInput("blob", problem)
    return data


def check(reference: BlobReference) -> None:
    """Raise InvalidInput unless `store` can have made this reference. Nothing is fetched before."""
    if not _KEY.fullmatch(reference.key):
        raise InvalidInput("blob.key", f"is {reference.key[:80]!r}, must be 32 hexadecimal digits")
    if not 0 < reference.size_bytes <= LARGEST_BYTES:
        raise InvalidInput("blob.size_bytes", f"is {reference.size_bytes}, must be in [1, {LARGEST_BYTES}]")
    chunks = -(-reference.size_bytes // CHUNK_BYTES)
    if reference.chunks != chunks:
        raise InvalidInput("blob.chunks", f"is {reference.chunks}; {reference.size_bytes} bytes are {chunks} chunks")
