"""Payloads above the broker's message limit: stored in chunks beside the log, fetched with many requests in flight.

A chunk is an ordinary message with a checksum over the whole in the reference, so that what is read back is what was
written or an error.
"""

import asyncio
import hashlib
import zlib
from collections.abc import Callable

from trinity.api.common.v1 import experience_pb2
from trinity.runtime.broker import Broker
from trinity.runtime.errors import DataLoss
from trinity.runtime.names import RunNames

CHUNK_BYTES = 512 * 1024
_IN_FLIGHT = 16


async def store(
    broker: Broker, names: RunNames, data: bytes, on_refused: Callable[[str], None] | None = None
) -> experience_pb2.BlobReference:
    """Store `data` under a key derived from its content; again changes nothing. Raises as Broker.publish does."""
    key = hashlib.sha256(data).hexdigest()[:32]
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    gate = asyncio.Semaphore(_IN_FLIGHT)

    async def put(index: int, chunk: bytes) -> None:
        async with gate:
            await broker.publish(names.blob(key, index), chunk, message_id=f"{key}/{index}", on_refused=on_refused)

    await asyncio.gather(*(put(index, chunk) for index, chunk in enumerate(chunks)))
    return experience_pb2.BlobReference(key=key, size_bytes=len(data), chunks=len(chunks), crc32=zlib.crc32(data))


async def fetch(broker: Broker, names: RunNames, reference: experience_pb2.BlobReference) -> bytes:
    """The payload of a reference. DataLoss if a chunk is gone or the content is not what was stored."""
    gate = asyncio.Semaphore(_IN_FLIGHT)

    async def get(index: int) -> bytes:
        async with gate:
            return (await broker.last(names.blobs_stream, names.blob(reference.key, index))).data

    data = b"".join(await asyncio.gather(*(get(index) for index in range(reference.chunks))))
    if len(data) != reference.size_bytes or zlib.crc32(data) != reference.crc32:
        raise DataLoss(f"blob {reference.key} has {len(data)} bytes and another checksum than its reference says")
    return data
