"""The store of small models in a JetStream stream: a file is chunks of half a MiB and a closing entry.

nats-py runs in an event loop in a thread that lives from the first call until `close`.
"""

import asyncio
import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import xxhash

from trinity.runtime.broker import Broker, StreamSpec, connect, ensure_streams
from trinity.runtime.errors import DataLoss, InvalidInput, NotFound, PermissionDenied
from trinity.runtime.names import RunNames
from trinity.weights.manifest import FileInfo, JetStreamOffer, Manifest, Offer
from trinity.weights.stores.base import MANIFEST, Store
from trinity.weights.wire import Blob, decode_blob, encode_blob

CHUNK_BYTES = 512 * 1024
MOST_BYTES = 256 * 1024 * 1024
_STREAM_BYTES = 8 * MOST_BYTES
_IN_FLIGHT = 16
_END = "end"
_AGAIN_SECONDS = 0.2
_SETTLE_SECONDS = 1.0  # a follower of a replicated stream may lag behind the newest acknowledgement
_PREFIX = re.compile(r"v[0-9]+")

Result = TypeVar("Result")


def weights_stream(names: RunNames) -> StreamSpec:
    """The stream of a run whose storage is on JetStream."""
    return StreamSpec(names.weights_stream, (names.subjects("weights"),), max_bytes=_STREAM_BYTES, replicas=0)


class JetStreamStore(Store):
    """Chunks under `v<version>`, file name and number. The closing entry has their number and the file's checksum."""

    kind = "jetstream"

    def __init__(self, run: str, nats_url: str, *, patience_seconds: float = 30.0) -> None:
        super().__init__(run)
        self._url = nats_url
        self._patience = patience_seconds
        self._names = RunNames(run)
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting = asyncio.Lock()
        self._broker: Broker | None = None

    @property
    def where(self) -> str:
        return f"NATS stream {self._names.weights_stream}"

    def offer(self, version: int, delta: bool) -> JetStreamOffer:
        return JetStreamOffer(f"v{version}", delta)

    def put(self, manifest: Manifest, source: Path, delta: bool) -> Offer:
        if manifest.size_bytes > MOST_BYTES:
            raise InvalidInput(
                "synchronizer.storage", f"jetstream is for models up to {MOST_BYTES >> 20} MiB, this one has "
                f"{manifest.size_bytes >> 20} MiB; use a folder or s3://bucket/prefix"
            )  # fmt: skip
        return super().put(manifest, source, delta)

    def delete(self, version: int) -> None:
        async def purge(broker: Broker) -> None:
            stream = self._names.weights_stream
            await broker.purge_subject(stream, self._names.weights_parts(f"v{version}", MANIFEST))
            await broker.purge_subject(stream, self._names.weights_parts(f"v{version}"))

        with contextlib.suppress(NotFound):
            self._read(purge)

    def close(self) -> None:
        with self._starting:
            loop, broker = self._loop, self._broker
            self._loop = self._broker = None
        if loop is not None:
            with contextlib.suppress(TimeoutError):
                if broker is not None:
                    asyncio.run_coroutine_threadsafe(broker.close(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)

    def _size(self, version: int, name: str) -> int | None:
        end = self._end(f"v{version}", name, _SETTLE_SECONDS)
        return end.size_bytes if end else None

    def _checksum(self, version: int, info: FileInfo) -> str | None:
        end = self._end(f"v{version}", info.name)
        return end.key if end else None

    def _end(self, prefix: str, name: str, wait_seconds: float = 0.0) -> Blob | None:
        try:
            return self._read(lambda broker: self._read_end(broker, prefix, name, wait_seconds))
        except NotFound:
            return None

    def _write(self, version: int, info: FileInfo, source: Path) -> None:
        def chunks() -> Iterator[bytes]:
            with source.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk

        self._store(f"v{version}", info, chunks())

    def _create(self, version: int, content: bytes) -> bool:
        if self._end(f"v{version}", MANIFEST) is not None:
            return False
        info = FileInfo(MANIFEST, len(content), xxhash.xxh3_128_hexdigest(content))
        chunks = (content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES))
        self._store(f"v{version}", info, chunks)
        return True

    def _store(self, prefix: str, info: FileInfo, chunks: Iterable[bytes]) -> None:
        # A new id for each attempt: JetStream would drop the same id as a duplicate even after a purge.
        attempt = secrets.token_hex(8)

        async def store(broker: Broker) -> None:
            await self._until_there(broker)
            await broker.purge_subject(self._names.weights_stream, self._names.weights_parts(prefix, info.name))

            async def publish(part: int | str, data: bytes) -> None:
                subject = self._names.weights_part(prefix, info.name, part)
                await broker.publish(subject, data, message_id=f"{attempt}/{part}")

            count = await _side_by_side(publish(index, chunk) for index, chunk in enumerate(chunks))
            await publish(_END, encode_blob(Blob(info.checksum, info.size_bytes, count)))

        self._call(store)

    async def _until_there(self, broker: Broker) -> None:
        """Make the stream if missing. Where NATS has users, only the buffer may, which perhaps starts later.

        Raises PermissionDenied if it does not within the patience.
        """
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return await ensure_streams(broker, [weights_stream(self._names)])
            except PermissionDenied:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_AGAIN_SECONDS)

    def _read_manifest(self, version: int) -> bytes | None:
        found = bytearray()

        def take(at: int, data: bytes) -> None:
            found[at : at + len(data)] = data

        async def read(broker: Broker) -> None:
            end = await self._read_end(broker, f"v{version}", MANIFEST)
            found.extend(bytes(end.size_bytes))
            await self._read_chunks(broker, f"v{version}", MANIFEST, end, take)

        try:
            self._read(read)
        except NotFound:
            return None
        return bytes(found)

    def _fetch(self, offer: Offer, name: str, target: Path) -> None:
        assert isinstance(offer, JetStreamOffer)
        if not _PREFIX.fullmatch(offer.prefix):
            raise InvalidInput("manifest.offers", f"{offer.prefix!r} is no prefix of a version in JetStream")

        async def read(broker: Broker) -> None:
            end = await self._read_end(broker, offer.prefix, name, _SETTLE_SECONDS)
            await self._read_chunks(broker, offer.prefix, name, end, lambda at, data: _write_at(handle, data, at))

        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self._read(read)
        finally:
            os.close(handle)

    async def _read_end(self, broker: Broker, prefix: str, name: str, wait_seconds: float = 0.0) -> Blob:
        """Returns the closing entry of a file. Raises NotFound if it does not arrive in time."""
        data = await self._part(broker, prefix, name, _END, wait_seconds)
        end = decode_blob(data)
        if not 0 <= end.size_bytes <= 2 * MOST_BYTES or end.chunks != -(-end.size_bytes // CHUNK_BYTES):
            raise DataLoss(f"{name} of {prefix} in {self.where} has {end.chunks} chunks for {end.size_bytes} bytes")
        return end

    async def _read_chunks(
        self,
        broker: Broker,
        prefix: str,
        name: str,
        end: Blob,
        take: Callable[[int, bytes], None],
    ) -> None:
        async def read(index: int) -> None:
            data = await self._part(broker, prefix, name, index, _SETTLE_SECONDS)
            if len(data) != min(CHUNK_BYTES, end.size_bytes - index * CHUNK_BYTES):
                raise DataLoss(f"{name} of {prefix} in {self.where}: chunk {index} has {len(data)} bytes")
            take(index * CHUNK_BYTES, data)

        await _side_by_side(read(index) for index in range(end.chunks))

    async def _part(self, broker: Broker, prefix: str, name: str, part: int | str, wait_seconds: float) -> bytes:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        subject = self._names.weights_part(prefix, name, part)
        while True:
            try:
                return (await broker.last(self._names.weights_stream, subject)).data
            except NotFound:
                if loop.time() >= deadline:
                    raise NotFound(f"{name} of {prefix} is not in {self.where} (part {part})") from None
            await asyncio.sleep(0.05)

    def _read(self, work: Callable[[Broker], Awaitable[Result]]) -> Result:
        """Runs `work`. Raises NotFound if the run has no stream of weights."""

        async def checked(broker: Broker) -> Result:
            await broker.state(self._names.weights_stream)
            return await work(broker)

        return self._call(checked)

    def _call(self, work: Callable[[Broker], Awaitable[Result]]) -> Result:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="weights-nats", daemon=True).start()
            loop = self._loop

        async def connected() -> Result:
            async with self._connecting:
                if self._broker is None:
                    self._broker = await connect(self._url, "weights", wait_seconds=self._patience)
            return await work(self._broker)

        return asyncio.run_coroutine_threadsafe(connected(), loop).result()


async def _side_by_side(work: Iterable[Awaitable[None]]) -> int:
    """Awaits all, a few at a time, and returns their number. The first error ends the wait."""
    running: set[asyncio.Future[None]] = set()
    count = 0
    try:
        for one in work:
            count += 1
            running.add(asyncio.ensure_future(one))
            if len(running) >= _IN_FLIGHT:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for ended in done:
                    ended.result()
        await asyncio.gather(*running)
    finally:
        for one_left in running:
            one_left.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return count


def _write_at(handle: int, data: bytes, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done:], start + done)
