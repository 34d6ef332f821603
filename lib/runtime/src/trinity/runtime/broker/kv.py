"""KV with compare-and-set, and a wait for changes that survives restarts of the server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import nats.errors
import nats.js.errors
from nats.js.api import KeyValueConfig, StorageType
from nats.js.kv import KeyValue

from trinity.runtime.broker.connection import Broker, SequenceConflict

_POLL_SECONDS = 1.0
_AFTER_HINT_SECONDS = (0.0, 0.01, 0.05)


@dataclass(frozen=True)
class Entry:
    """A value and the revision to compare with. Revision 0: there is no value."""

    value: bytes
    revision: int


ABSENT = Entry(b"", 0)


class Bucket:
    """One KV bucket. `put_if` is the only way to write: every change is a compare-and-set."""

    def __init__(self, broker: Broker, name: str, store: KeyValue) -> None:
        self._broker = broker
        self._store = store
        self.name = name

    @classmethod
    async def open(cls, broker: Broker, name: str, *, ttl_seconds: float | None = None, replicas: int = 0) -> "Bucket":
        """The bucket, made if missing. `replicas` 0: as many as usual on this broker."""
        try:
            store = await broker.request(lambda: broker.js.key_value(name), f"open {name}")
        except (nats.js.errors.NotFoundError, nats.js.errors.BucketNotFoundError):
            config = KeyValueConfig(
                bucket=name,
                history=4,
                ttl=ttl_seconds,
                storage=StorageType.FILE,
                replicas=replicas or broker.usual_replicas,
                direct=True,
            )
            store = await broker.request(lambda: broker.js.create_key_value(config), f"create {name}")
        return cls(broker, name, store)

    async def get(self, key: str) -> Entry:
        """The value, or ABSENT."""
        try:
            entry = await self._broker.request(lambda: self._store.get(key), f"get {key}")
        except nats.js.errors.NotFoundError:  # KeyNotFoundError and KeyDeletedError are kinds of it
            return ABSENT
        return Entry(entry.value or b"", entry.revision or 0)

    async def put_if(self, key: str, value: bytes, revision: int) -> int:
        """Write if the key is still at `revision` (0: absent); returns the new revision. SequenceConflict otherwise."""
        try:
            if revision:
                return await self._store.update(key, value, last=revision)
            return await self._store.create(key, value)
        except (nats.js.errors.KeyWrongLastSequenceError, nats.js.errors.BadRequestError):
            raise SequenceConflict(f"{self.name}/{key} is no longer at revision {revision}") from None
        except (TimeoutError, nats.errors.Error):
            # The answer was lost, the write perhaps not: look.
            there = await self.get(key)
            if there.value == value and there.revision > revision:
                return there.revision
            raise

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

    async def entries(self, prefix: str) -> dict[str, Entry]:
        """All values whose key begins with `prefix` followed by a dot."""
        stream, subject = f"KV_{self.name}", f"$KV.{self.name}."
        info = await self._broker.request(
            lambda: self._broker.js.stream_info(stream, subjects_filter=f"{subject}{prefix}.>"), f"keys {prefix}"
        )
        keys = sorted(name.removeprefix(subject) for name in info.state.subjects or {})
        found = await asyncio.gather(*(self.get(key) for key in keys))
        return {key: entry for key, entry in zip(keys, found, strict=True) if entry.revision}

    async def watch(self, key: str) -> AsyncIterator[Entry]:
        """The entry now and after every change (fast successive changes may be seen as one).

        A plain subscription on the bucket's subject is only a hint to look; the poll is what makes it sure.
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
