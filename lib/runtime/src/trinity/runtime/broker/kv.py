"""KV with compare-and-set, and a wait for changes that survives restarts of the server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import nats.errors
import nats.js.errors
import structlog
from nats.js.api import DiscardPolicy, KeyValueConfig, StorageType, StreamConfig
from nats.js.kv import KeyValue

from trinity.runtime.broker.connection import Broker, SequenceConflict, StoredMessage, is_cancelled
from trinity.runtime.errors import Unavailable

log = structlog.get_logger(__name__)

_POLL_SECONDS = 1.0
_AFTER_HINT_SECONDS = (0.0, 0.01, 0.05)
_READ_TOGETHER = 1000
_OPERATION = "KV-Operation"


@dataclass(frozen=True)
class Entry:
    """A value and the revision to compare with. Revision 0: there is no value."""

    value: bytes
    revision: int


ABSENT = Entry(b"", 0)


@dataclass(frozen=True)
class Change:
    """A value that was written under a key, or None: the key was deleted."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True)
class Changes:
    """Changes in order. `lost`: the bucket is another one than before, and what was in the old one is gone."""

    changes: tuple[Change, ...]
    lost: bool = False


class Bucket:
    """One KV bucket. Every change but `put` is a compare-and-set."""

    def __init__(self, broker: Broker, name: str, store: KeyValue, config: KeyValueConfig | None = None) -> None:
        self._broker = broker
        self._store = store
        self._config = config
        self.name = name

    @classmethod
    async def open(
        cls,
        broker: Broker,
        name: str,
        *,
        ttl_seconds: float | None = None,
        replicas: int = 0,
        in_memory: bool = False,
        purges: bool = True,
    ) -> "Bucket":
        """The bucket, made if missing. `replicas` 0: as many as usual on this broker.

        purges: False where roles of several runs have keys: NATS lets who may purge a key of a bucket purge all keys.

        A bucket in memory is empty after a restart of the only server that has it; `follow` makes it again.
        """
        config = KeyValueConfig(
            bucket=name,
            history=1 if in_memory else 4,
            ttl=ttl_seconds,
            storage=StorageType.MEMORY if in_memory else StorageType.FILE,
            replicas=replicas or broker.usual_replicas,
            direct=True,
        )
        if (there := await cls.find(broker, name)) is not None:
            return cls(broker, name, there._store, config)
        make = broker.js.create_key_value if purges else lambda given: _create_without_purges(broker, given)
        store = await broker.request(lambda: make(config), f"create {name}")
        return cls(broker, name, store, config)

    @classmethod
    async def find(cls, broker: Broker, name: str) -> "Bucket | None":
        """The bucket, for callers that may not create it; None if it is missing."""
        try:
            return cls(broker, name, await broker.request(lambda: broker.js.key_value(name), f"open {name}"))
        except (nats.js.errors.NotFoundError, nats.js.errors.BucketNotFoundError):
            return None

    async def get(self, key: str) -> Entry:
        """The value, or ABSENT."""
        try:
            entry = await self._broker.request(lambda: self._store.get(key), f"get {key}")
        except nats.js.errors.NotFoundError:  # KeyNotFoundError and KeyDeletedError are kinds of it
            return ABSENT
        return Entry(entry.value or b"", entry.revision or 0)

    async def leader_sequence(self) -> int | None:
        """Returns the sequence of the newest write by the bucket's leader; None with a single server.

        Reads ask any replica, which may be behind the leader. Unavailable if there is none for half a minute.
        """
        if self._broker.usual_replicas == 1:
            return None
        return (await self._broker.state(f"KV_{self.name}")).last_sequence

    async def put_if(self, key: str, value: bytes, revision: int) -> int:
        """Write if the key is still at `revision` (0: absent); returns the new revision. SequenceConflict otherwise."""
        try:
            if revision:
                return await self._store.update(key, value, last=revision)
            return await self._store.create(key, value)
        except (nats.js.errors.KeyWrongLastSequenceError, nats.js.errors.BadRequestError):
            raise SequenceConflict(f"{self.name}/{key} is no longer at revision {revision}") from None
        except (TimeoutError, nats.errors.Error):
            # The answer was lost, the write perhaps not: read it back.
            there = await self.get(key)
            if there.value == value and there.revision > revision:
                return there.revision
            raise

    async def put(self, key: str, value: bytes) -> None:
        """Overwrites a value without a comparison: for keys with one writer."""
        await self._broker.request(lambda: self._store.put(key, value), f"put {key}")

    async def update(self, key: str, change: Callable[[bytes], bytes | None]) -> bytes:
        """Apply `change(old) -> new` atomically, again on every conflict; None from `change` leaves the value."""
        while True:
            entry = await self.get(key)
            value = change(entry.value)
            if value is None or value == entry.value:
                return entry.value
            with contextlib.suppress(SequenceConflict, nats.errors.Error, asyncio.TimeoutError):
                await self.put_if(key, value, entry.revision)
                return value
            await asyncio.sleep(0.01)

    async def delete(self, key: str) -> None:
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await self._broker.request(lambda: self._store.delete(key), f"delete {key}")

    async def purge(self, key: str) -> None:
        """Delete the key with its former values; `delete` keeps the newest of them on disk."""
        await self._broker.request(lambda: self._store.purge(key), f"purge {key}")

    async def delete_if(self, key: str, revision: int) -> None:
        """Delete if the key is still at `revision`. SequenceConflict otherwise."""
        try:
            await self._store.delete(key, last=revision)
        except nats.js.errors.BadRequestError:
            raise SequenceConflict(f"{self.name}/{key} is no longer at revision {revision}") from None

    async def entries(self, prefix: str) -> dict[str, Entry]:
        """All values whose key begins with `prefix` followed by a dot."""
        keys = await self._keys(prefix)
        found = await asyncio.gather(*(self.get(key) for key in keys))
        return {key: entry for key, entry in zip(keys, found, strict=True) if entry.revision}

    async def has(self, prefix: str) -> bool:
        """Returns True if a key that begins with `prefix` and a dot was ever written and is not forgotten yet."""
        try:
            return bool(await self._keys(prefix))
        except nats.js.errors.NotFoundError:  # a bucket in memory is gone after a restart of its server
            return False

    async def _keys(self, prefix: str) -> list[str]:
        stream, subject = f"KV_{self.name}", f"$KV.{self.name}."
        info = await self._broker.request(
            lambda: self._broker.js.stream_info(stream, subjects_filter=f"{subject}{prefix}.>"), f"keys {prefix}"
        )
        return sorted(name.removeprefix(subject) for name in info.state.subjects or {})

    async def watch(self, key: str) -> AsyncIterator[Entry]:
        """The entry now and after every change (fast successive changes may be seen as one).

        A plain subscription on the bucket's subject is only a hint; polling makes sure that no change is missed.
        """
        hint = asyncio.Event()

        async def on_message(_: object) -> None:
            hint.set()

        subscription = await self._broker.client.subscribe(f"$KV.{self.name}.{key}", cb=on_message)
        try:
            entry = await self.get(key)
            yield entry
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(hint.wait(), _POLL_SECONDS)
                hint.clear()
                for pause in _AFTER_HINT_SECONDS:
                    await asyncio.sleep(pause)
                    fresh = await self.get(key)
                    if fresh.revision != entry.revision:
                        entry = fresh
                        yield entry
                        break
        finally:
            with contextlib.suppress(Exception):
                await subscription.unsubscribe()

    async def follow(self, prefix: str, every_seconds: float | None = None) -> AsyncIterator[Changes]:
        """First all keys under a prefix, then every change, without end: it survives restarts of the server.

        A plain subscription says when to read. Where changes are frequent and may wait, use `every_seconds`.
        """
        hint = asyncio.Event()

        async def on_message(_: object) -> None:
            hint.set()

        tail = _Tail(self._broker, self.name, prefix, self._config)
        subscription = None
        if every_seconds is None:
            subscription = await self._broker.client.subscribe(tail.subject, cb=on_message)
        try:
            yield Changes(await tail.read())
            while not is_cancelled():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(every_seconds or _POLL_SECONDS):
                        await hint.wait()
                pauses = _AFTER_HINT_SECONDS if hint.is_set() else (0.0,)
                hint.clear()
                await tail.check_bucket()
                for pause in pauses:
                    await asyncio.sleep(pause)
                    changes = await tail.read()
                    if changes:
                        break
                if changes or tail.lost:
                    yield Changes(changes, tail.lost)
                    tail.lost = False
            raise asyncio.CancelledError
        finally:
            if subscription is not None:
                with contextlib.suppress(Exception):
                    await subscription.unsubscribe()


async def _create_without_purges(broker: Broker, config: KeyValueConfig) -> KeyValue:
    """Creates the stream as nats-py does, but without roll-ups."""
    stream = StreamConfig(
        name=f"KV_{config.bucket}",
        subjects=[f"$KV.{config.bucket}.>"],
        allow_direct=config.direct,
        deny_delete=True,
        discard=DiscardPolicy.NEW,
        duplicate_window=min(120.0, config.ttl or 120.0),
        max_age=config.ttl,
        max_consumers=-1,
        max_msgs=-1,
        max_msgs_per_subject=config.history,
        num_replicas=config.replicas,
        storage=config.storage,
    )
    await broker.js.add_stream(stream)
    return await broker.js.key_value(config.bucket)


class _Tail:
    """Reads the stream behind a bucket: in order, many changes with one request."""

    def __init__(self, broker: Broker, bucket: str, prefix: str, config: KeyValueConfig | None) -> None:
        self._broker = broker
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._config = config
        self._position = 1
        self._born: object = None
        self._checked_at = 0.0
        self.lost = False
        self.subject = f"$KV.{bucket}.{prefix}.>"

    async def read(self) -> tuple[Change, ...]:
        """Yields the writes since the last call."""
        if self._born is None:
            await self.check_bucket()
        changes: list[Change] = []
        while True:
            found = await self._broker.several(self._stream, self._position, _READ_TOGETHER, self.subject)
            changes += map(self._change, found)
            if found:
                self._position = found[-1].sequence + 1
            if found[-1].headers.get("Nats-Num-Pending") == "0" if found else await self._is_at_the_end():
                return tuple(changes)

    async def _is_at_the_end(self) -> bool:
        """Returns True if nothing is left to read, False if the server does not answer."""
        js = self._broker.js

        def next_message() -> Awaitable[object]:
            return js.get_msg(self._stream, seq=self._position, subject=self.subject, next=True, direct=True)

        try:
            await self._broker.request(next_message, f"read {self._stream}", _POLL_SECONDS)
        except nats.js.errors.NotFoundError:
            return True
        except Unavailable:
            self._checked_at = 0.0
            await self.check_bucket()
        return False

    async def check_bucket(self) -> None:
        """Check once a second whether the bucket was recreated; if so, read it from its beginning."""
        if time.monotonic() - self._checked_at < _POLL_SECONDS:
            return
        born = await self._when_made()
        if self._born is not None and born != self._born:
            log.warning("broker.bucket.new", bucket=self._bucket)
            self._position, self.lost = 1, True
        self._born, self._checked_at = born, time.monotonic()

    async def _when_made(self) -> object:
        """Creation time of the bucket (server clock). A missing bucket is created; waits while NATS is away."""
        js, stream = self._broker.js, self._stream
        while True:
            try:
                return (await self._broker.request(lambda: js.stream_info(stream), f"look at {stream}")).created
            except nats.js.errors.NotFoundError:
                with contextlib.suppress(Unavailable, nats.js.errors.Error):
                    await self._broker.request(lambda: js.create_key_value(self._config), f"make {stream}")
            except Unavailable as error:
                log.info("broker.bucket.unavailable", bucket=self._bucket, reason=str(error))
            await asyncio.sleep(_POLL_SECONDS / 10)

    def _change(self, message: StoredMessage) -> Change:
        key = message.subject.removeprefix(f"$KV.{self._bucket}.")
        return Change(key, None if _OPERATION in message.headers else message.data, message.sequence)
