"""The explorers of a run, each with a lease that its reports renew, and their collective groups.

A collective group is a numbered epoch; the number stays the same while the members do. All members are in memory. A
report is written to KV when it has news, or when a third of the lease has passed. A lease's age is the time since this
process heard of its member, directly or through KV, so that hosts need not agree on the time.
"""

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from trinity.runtime.broker import Bucket, SequenceConflict
from trinity.runtime.errors import AlreadyExists, InvalidInput, NotFound
from trinity.runtime.names import RunNames
from trinity.sync.store import clock, records
from trinity.sync.store.mirror import Mirror
from trinity.sync.store.records import Member
from trinity.sync.store.state import ChangeEvent, RunState
from trinity.weights.pointer import Epoch, EpochMember, Live
from trinity.weights.wire import ExplorerState

log = structlog.get_logger(__name__)

# Other instances' reports may be this late: leases are long.
_POLL_SECONDS = 0.25
_SWEEP_SECONDS = 0.5
_LONGEST_NAME = 256  # characters, as in experience
_KEY = re.compile(r"[A-Za-z0-9_-]+")
BACKENDS = ("gloo", "nccl")
_READY = (ExplorerState.RUNNING, ExplorerState.WAITING, ExplorerState.UPDATING)
# Fields that others decide by; the rest of a report can wait.
_MATERIAL = ("version", "state", "failure", "transport")


@dataclass
class _Held:
    """A member in memory; times are the clock's."""

    member: Member
    heard_at: float
    written_at: float


def check_new(member: Member) -> None:
    """Raises InvalidInput for a member that cannot join any run."""
    if not member.explorer_id:
        raise InvalidInput("explorer_id", "is empty")
    if len(member.explorer_id) > _LONGEST_NAME or not member.explorer_id.isprintable():
        problem = f"has {len(member.explorer_id)} characters, must be at most {_LONGEST_NAME}, and printable"
        raise InvalidInput("explorer_id", f"{problem}; give explorer.name another value")
    platform = member.capabilities.platform
    if len(platform) > _LONGEST_NAME or not platform.isprintable():
        problem = f"has {len(platform)} characters, must be at most {_LONGEST_NAME}, and printable"
        raise InvalidInput("capabilities.platform", f"{problem}; name device, torch and vLLM")


class Members:
    """The members of one run. `changed` is notified when a member joins, leaves or changes its state."""

    def __init__(self, bucket: Bucket, run: str, lease_seconds: float) -> None:
        self._names = RunNames(run)
        self._mirror = Mirror(
            bucket,
            self._names.members,
            self._on_change,
            every_seconds=_POLL_SECONDS,
            keep_when_lost=True,
            check=self._check,
        )
        self._held: dict[str, _Held] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}
        self.lease_seconds = lease_seconds
        self.changed = ChangeEvent()
        self.ready = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mirror.run())
            group.create_task(self._sweep())

    async def _sweep(self) -> None:
        await self._mirror.ready.wait()
        self._drop_what_was_dead_before()
        self.ready.set()
        while True:
            for key, held in list(self._held.items()):
                if not self._is_alive(held):
                    log.info("sync.member.expired", explorer=held.member.explorer_id, pid=held.member.pid)
                    self._drop(key)
            await asyncio.sleep(_SWEEP_SECONDS)

    def _drop_what_was_dead_before(self) -> None:
        """Drops members that died before this service started. Leases restart relative to the newest report."""
        newest = max((held.member.reported_at for held in self._held.values()), default=0.0)
        for key, held in list(self._held.items()):
            if held.member.reported_at < newest - self.lease_seconds:
                self._drop(key)

    def _is_alive(self, held: _Held) -> bool:
        return clock.now() - held.heard_at < self.lease_seconds

    def _drop(self, key: str) -> None:
        held = self._held.pop(key, None)
        self._mirror.forget(key)
        if held is not None:
            self._end(held.member.lease_id)

    def _end(self, lease_id: str) -> None:
        end = self._ends.pop(lease_id, None)
        if end is not None:
            end.set_result(None)
        self.changed.notify()

    def _on_change(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._drop(key)
            return
        member, before = records.decode(Member, value), self._held.get(key)
        now = clock.now()
        self._held[key] = _Held(member, now, now)
        if before is None:
            self.changed.notify()
        elif before.member.lease_id != member.lease_id:
            self._end(before.member.lease_id)
        elif before.member.state != member.state:
            self.changed.notify()

    def _check(self, key: str, value: bytes) -> None:
        """Raises the problem of a value."""
        name = records.decode(Member, value).explorer_id
        if key != self._names.member_key(name):
            raise ValueError(f"it is the entry of explorer {name[:80]!r}")

    def all(self) -> list[Member]:
        """Returns members whose lease is alive, by name."""
        alive = (held.member for held in self._held.values() if self._is_alive(held))
        return sorted(alive, key=lambda member: member.explorer_id)

    def seconds_since_report(self, member: Member) -> float:
        held = self._held.get(self._names.member_key(member.explorer_id))
        return clock.now() - held.heard_at if held else 0.0

    async def join(self, member: Member) -> Member:
        """Adds a member, or replaces it if its lease ran out or its process is the same. Else raises AlreadyExists."""
        check_new(member)
        key = self._names.member_key(member.explorer_id)
        lease_id = f"{key.rpartition('.')[2]}.{uuid.uuid4().hex}"
        joined = replace(member, lease_id=lease_id, reported_at=time.time())

        def enter(value: bytes) -> bytes:
            held = self._held.get(key)
            if value and held is not None and self._is_alive(held):
                old = held.member
                if (old.pid, old.host) != (member.pid, member.host):
                    raise AlreadyExists(
                        f"explorer_id: {member.explorer_id!r} is taken by process {old.pid} on {old.host}; "
                        "explorer.name must differ between explorers of one run"
                    )
            return records.encode_member(joined)

        await self._mirror.change(key, enter)
        log.info("sync.member.joined", explorer=joined.explorer_id, pid=joined.pid, host=joined.host)
        return joined

    async def find(self, lease_id: str, *, in_kv: bool = False) -> Member:
        """Returns the member of a living lease. Raises NotFound. `in_kv` reads KV, where other instances write."""
        return (await self._find(lease_id, in_kv=in_kv))[1].member

    async def _find(self, lease_id: str, *, in_kv: bool = False) -> tuple[str, _Held]:
        tail = lease_id.rpartition(".")[0]
        if _KEY.fullmatch(tail):
            key = f"{self._names.members}.{tail}"
            held = self._held.get(key)
            if in_kv or held is None or held.member.lease_id != lease_id:  # it may just have joined elsewhere
                await self._mirror.fresh(key)
                held = self._held.get(key)
            if held is not None and held.member.lease_id == lease_id and self._is_alive(held):
                return key, held
        raise NotFound("lease_id: no such lease; it ran out or was never given, join again")

    async def report(self, lease_id: str, **changes: Any) -> Member:
        """Renews the lease and stores the report. Raises NotFound if the lease is gone."""
        key, held = await self._find(lease_id)
        before, now = held.member, clock.now()
        member = replace(before, **changes, reported_at=time.time())
        held.heard_at = now
        is_news = any(getattr(before, name) != getattr(member, name) for name in _MATERIAL)
        if not is_news and now - held.written_at < self.lease_seconds / 3:
            held.member = member
            return member

        def renew(value: bytes) -> bytes:
            if not value or records.decode(Member, value).lease_id != lease_id:
                raise NotFound("lease_id: the lease ran out; join again")
            return records.encode_member(member)

        await self._mirror.change(key, renew, from_known=True)
        return member

    async def leave(self, lease_id: str) -> None:
        """Removes a member; does nothing if the lease is gone already."""
        while True:
            try:
                key, held = await self._find(lease_id)
            except NotFound:
                return
            entry = await self._mirror.fresh(key)
            with contextlib.suppress(SequenceConflict):  # its report may be under way
                if entry.revision:
                    await self._mirror.delete_if(key, entry.revision)
                self._drop(key)
                log.info("sync.member.left", explorer=held.member.explorer_id)

    def seconds_left(self, lease_id: str) -> float:
        """Returns the seconds until the lease runs out without a report."""
        held = self._held.get(f"{self._names.members}.{lease_id.rpartition('.')[0]}")
        if held is None or held.member.lease_id != lease_id:
            return 0.0
        return max(0.0, self.lease_seconds - (clock.now() - held.heard_at))

    def end(self, lease_id: str) -> "asyncio.Future[None]":
        """Returns a future that is done when the lease ends. Wait with asyncio.wait, which does not cancel it."""
        if lease_id not in self._ends:
            self._ends[lease_id] = asyncio.get_running_loop().create_future()
        return self._ends[lease_id]


def ready_members(members: Sequence[Member], live: Live, backend: str, excluded: Collection[str]) -> list[Member]:
    """Returns the explorers that can and may take part in the next update, by name."""
    return sorted(
        (
            member
            for member in members
            if f"collective-{backend}" in member.capabilities.transports
            and member.state in _READY
            and (live.version < 0 or member.version == live.version)
            and member.explorer_id not in excluded
        ),
        key=lambda member: member.explorer_id,
    )


def ranked(members: Sequence[Member]) -> tuple[EpochMember, ...]:
    """Ranks the members: the trainer is rank 0, and each member has a rank for every worker of every engine."""
    first, found = 1, []
    for member in members:
        ranks = max(1, member.capabilities.engines) * max(1, member.capabilities.tensor_parallel_size)
        found.append(EpochMember(member.explorer_id, first, ranks, member.lease_id))
        first += ranks
    return tuple(found)


class Epochs:
    """The epochs of one run."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    async def form(
        self, members: Sequence[Member], backend: str, store: tuple[str, str], excluded: Collection[str], *, renew: bool
    ) -> Epoch:
        """Forms the epoch for the next update. It has no members if none is ready; former members are told.

        `store`: address and secret of the trainer's store.
        """
        store_address, store_secret = store
        if backend not in BACKENDS:
            raise InvalidInput("backend", f"is {backend!r}, must be one of {', '.join(BACKENDS)}")
        if not store_address:
            raise InvalidInput("store_address", "is empty; members must know where to meet")
        wanted = ranked(ready_members(members, self._state.live, backend, excluded))
        formed = Epoch()

        def change(value: bytes) -> bytes | None:
            nonlocal formed
            formed = records.decode_or_new(Epoch, value)
            place = formed.store_address, formed.store_secret
            same = (formed.backend, place, formed.members) == (backend, store, wanted)
            if (same and not renew) or not (wanted or formed.members):
                return None
            formed = replace(
                formed,
                number=formed.number + 1,
                backend=backend,
                store_address=store_address,
                store_secret=store_secret,
                members=wanted,
            )
            return records.encode(formed)

        before = self._state.epoch.number
        await self._state.mirror.change(self._state.names.epoch_key, change)
        if formed.number != before:
            log.info("sync.epoch.formed", number=formed.number, backend=backend, members=len(formed.members))
        return formed
