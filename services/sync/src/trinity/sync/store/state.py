"""One run's KV entries as values: the pointer, the records, the claim, the candidate, the epoch."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import cached_property, partial

import structlog

from trinity.runtime.broker import Bucket, SequenceConflict
from trinity.runtime.errors import Conflict, NotFound
from trinity.runtime.names import RunNames
from trinity.sync.store import records
from trinity.sync.store.mirror import Mirror
from trinity.sync.store.records import Candidate, Claim, Member, Platform, Record
from trinity.weights.pointer import Epoch, Live, decode_live, encode

log = structlog.get_logger(__name__)


class RunState:
    """The values of one run. `changed` is notified of every change, and `changes` counts them."""

    def __init__(self, bucket: Bucket, run: str) -> None:
        self.names = RunNames(run)
        self.mirror = Mirror(bucket, run, self._on_change, check=self._check)
        self.changed = ChangeEvent()
        self.changes = 0
        self._decoders: dict[str, Callable[[bytes], object]] = {
            self.names.live_key: decode_live,
            self.names.claim_key: partial(records.decode_or_new, Claim),
            self.names.candidate_key: partial(records.decode_or_new, Candidate),
            self.names.epoch_key: partial(records.decode_or_new, Epoch),
            self.names.platform_key: partial(records.decode_or_new, Platform),
        }
        self.live, self.claim, self.candidate, self.epoch = Live(), Claim(), Candidate(), Epoch()
        self.platform = Platform()
        self.records: dict[int, Record] = {}

    def _on_change(self, key: str, value: bytes | None) -> None:
        name = key.rpartition(".")[2]
        if key in self._decoders:
            setattr(self, name, self._decoders[key](value or b""))
        elif value is not None:
            self.records[int(name)] = records.decode(Record, value)
        elif name.isdecimal():
            self.records.pop(int(name), None)
        self.__dict__.pop("newest_first", None)
        self.changes += 1
        self.changed.notify()

    def _check(self, key: str, value: bytes) -> None:
        """Raises the problem of a value. The mirror holds only values that pass."""
        if key in self._decoders:
            self._decoders[key](value)
            return
        version = records.decode(Record, value).version
        if key != self.names.version_key(version) or not 0 <= version < 2**63:
            raise ValueError(f"it is the record of version {version}")

    @cached_property
    def newest_first(self) -> list[Record]:
        return [self.records[version] for version in sorted(self.records, reverse=True)]

    async def record(self, version: int) -> Record:
        """Reads a record from KV. Raises NotFound for an unknown version."""
        entry = await self.mirror.fresh(self.names.version_key(version))
        if not entry.value:
            raise NotFound(f"version: this run has no version {version}")
        return records.decode(Record, entry.value)

    async def pointer(self) -> Live:
        """Reads the pointer from KV."""
        return decode_live((await self.mirror.fresh(self.names.live_key)).value)

    async def keep_platform(self, member: Member) -> None:
        """Stores the platform of a reproducible run's first explorer. Raises Conflict for an explorer with another."""
        wanted = Platform(member.capabilities.platform, member.explorer_id)

        def keep(value: bytes) -> bytes | None:
            first = records.decode_or_new(Platform, value)
            if first.platform and first.platform != wanted.platform:
                raise Conflict(
                    f"capabilities.platform: is {wanted.platform}; the run is reproducible, and {first.explorer_id} "
                    f"samples on {first.platform}, whose bits may differ; start this explorer on the same"
                )
            return None if first.platform else encode(wanted)

        if wanted.platform:
            await self.mirror.change(self.names.platform_key, keep)

    async def forget(self, version: int) -> None:
        """Deletes a record and its former values, unless it has changed."""
        key = self.names.version_key(version)
        with contextlib.suppress(SequenceConflict):
            await self.mirror.delete_if(key, self.mirror.known(key).revision)
            await self.mirror.purge(key)

    async def change_record(self, version: int, change: Callable[[Record], Record | None]) -> Record | None:
        """Applies `change` to a record atomically; returns None if it stayed the same. Raises NotFound."""
        changed: Record | None = None

        def apply(value: bytes) -> bytes | None:
            nonlocal changed
            if not value:
                raise NotFound(f"version: this run has no version {version}")
            record = records.decode(Record, value)
            changed = change(record)
            if changed == record:
                changed = None
            return None if changed is None else records.encode(changed)

        await self.mirror.change(self.names.version_key(version), apply)
        return changed

    async def change_pointer(self, change: Callable[[Live], Live | None]) -> Live:
        """Applies `change` to the pointer atomically; None from `change` leaves it."""

        def apply(value: bytes) -> bytes | None:
            changed = change(decode_live(value))
            return None if changed is None else encode(changed)

        return decode_live(await self.mirror.change(self.names.live_key, apply))


class ChangeEvent:
    """An event that happens many times; each wait is for the next time."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def next(self) -> "asyncio.Future[None]":
        """Returns a future of the next time. Wait with asyncio.wait, which does not cancel it."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    def notify(self) -> None:
        if self._next is not None:
            self._next.set_result(None)
            self._next = None
