"""Random calls of trainers, explorers and operators, by two instances at once, which are killed between any two writes.

In any order, KV tells one story: what is LIVE was VERIFIED, what was rejected or withdrawn never is
LIVE again, the pointer goes back by rollbacks alone, and gates that were met stay met.
"""

import asyncio
import contextlib
import contextvars
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.servers.sync_instances import base_manifest, instance, make_manifest, measured, until
from trinity.runtime.broker import Bucket, connect
from trinity.runtime.errors import TrinityError
from trinity.runtime.names import VERSIONS_BUCKET, RunNames
from trinity.sync.runs import Run
from trinity.sync.store import records
from trinity.sync.store.records import Record
from trinity.sync.versions import Pin, Reject, Verify, current, next_live
from trinity.weights.pointer import Live, decode_live
from trinity.weights.wire import VersionState

pytestmark = pytest.mark.core

# (what, which version, counted back from the newest; which instance, killed before its n-th write or never)
CALL = st.tuples(
    st.sampled_from(["publish", "again", "verify", "reject", "rollback", "pin", "collect", "both"]),
    st.integers(0, 4),
    st.integers(0, 1),
    st.one_of(st.none(), st.integers(0, 3)),
)

PutIf = Callable[[str, bytes, int], Coroutine[Any, Any, None]]


class Killed(Exception):
    """The call ends here, as by kill -9: nothing more of it is written."""


# Set in the call that is to be killed, and so in the tasks it starts; not in what the instance does beside it.
_IN_CALL = contextvars.ContextVar("in_call", default=False)


@dataclass
class Story:
    """What KV told so far."""

    pointer: Live = field(default_factory=Live)
    verified: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    was_live: set[int] = field(default_factory=set)

    def advance(self, pointer: Live, found: dict[int, Record]) -> None:
        before = self.pointer
        assert pointer.gate_step >= before.gate_step
        assert pointer.newest_version >= before.newest_version
        assert pointer.step <= pointer.gate_step <= max(pointer.newest_step, pointer.step)
        done = _number(pointer) - _number(before)
        if pointer.version < before.version:
            assert done > 0, "back without a rollback"
        if done:
            kept = [rollback for rollback in before.rollbacks if rollback.number >= pointer.rollbacks[0].number]
            assert list(pointer.rollbacks[: len(kept)]) == kept
            for rollback in pointer.rollbacks:
                self.bad |= {version for version in found if rollback.version < version <= rollback.newest_version}
            assert all(rollback.version in self.was_live for rollback in pointer.rollbacks)
        if pointer.version >= 0:
            live = found[pointer.version]
            assert (live.state, live.was_live, live.collected) == (VersionState.VERIFIED, True, False)
            assert pointer.version not in self.bad
            self.was_live.add(pointer.version)
        for version, record in found.items():
            assert not (version in self.verified and record.state is not VersionState.VERIFIED)
            assert not (version in self.bad and current(record, pointer).state is not VersionState.REJECTED)
            self.bad |= {version} if record.state is VersionState.REJECTED else set()
            self.verified |= {version} if record.state is VersionState.VERIFIED else set()
        assert sum(current(record, pointer).state is VersionState.LIVE for record in found.values()) <= 1
        self.pointer = pointer


def _number(pointer: Live) -> int:
    return pointer.rollback.number if pointer.rollback else 0


class World:
    """Two instances on one run, and a reader of KV past both."""

    def __init__(self, folder: Path, run: str, bucket: Bucket, instances: tuple[Run, Run]) -> None:
        self.folder, self.run, self.bucket, self.instances = folder, run, bucket, instances
        self.names = RunNames(run)
        self.newest = 0
        self.story = Story()
        self.pinned: set[int] = set()
        self.made = {0: base_manifest(run)}

    def watch_writes(self) -> None:
        """Note what was LIVE between two observations: KV keeps few values of a key, so a reader may miss one."""
        for run in self.instances:
            run.state.mirror.put_if = self._noted(run.state.mirror.put_if)  # type: ignore[method-assign, assignment]

    def _noted(self, put_if: PutIf) -> PutIf:
        async def noted(key: str, value: bytes, revision: int) -> None:
            await put_if(key, value, revision)
            if key == self.names.live_key:
                self.story.was_live.add(decode_live(value).version)

        return noted

    async def observe(self) -> dict[int, Record]:
        """The records after the pointer: what it names must be there."""
        pointer = decode_live((await self.bucket.get(self.names.live_key)).value)
        entries = await self.bucket.entries(f"{self.run}.version")
        found = {int(key.rpartition(".")[2]): records.decode(Record, entry.value) for key, entry in entries.items()}
        self.story.advance(pointer, found)
        return found

    async def call(self, what: str, back: int, which: int, writes: int | None) -> None:
        run, version = self.instances[which], max(0, self.newest - back)
        with _killed_after(run, writes), contextlib.suppress(TrinityError, Killed):
            await self._do(what, run, version, back)

    async def _do(self, what: str, run: Run, version: int, back: int) -> None:
        if what == "publish":
            self.newest += 1
            made = make_manifest(self.folder, self.newest, canary=bool(back % 2), run=self.run)
            self.made[self.newest] = made
            await run.versions.publish(made)
        elif what == "again":
            await run.versions.publish(self.made[version])
        elif what == "verify":
            await run.versions.apply(version, Verify(measured(version)))
        elif what == "reject":
            await run.versions.apply(version, Reject("for the test"))
        elif what == "rollback":
            await run.versions.roll_back(version, keep_experience=False, reason="")
        elif what == "pin":
            await run.versions.apply(version, Pin(True))
            self.pinned.add(version)
        elif what == "collect":
            released = await run.versions.collect([version], 2)
            assert not self.pinned & set(released)
            assert 0 not in released
        else:
            one, two = self.instances
            calls: list[Awaitable[object]] = [
                one.versions.publish(self.made[version]),
                two.versions.roll_back(max(0, version - 1), keep_experience=True, reason="both"),
                two.versions.apply(version, Verify(measured(version))),
                one.versions.apply(version, Reject("both")),
            ]
            await asyncio.gather(*calls, return_exceptions=True)


@contextlib.contextmanager
def _killed_after(run: Run, writes: int | None):  # type: ignore[no-untyped-def]
    """The instance writes so often, and then nothing until its call has ended."""
    mirror, left = run.state.mirror, writes
    put_if = mirror.put_if

    async def counted(key: str, value: bytes, revision: int) -> None:
        nonlocal left
        if left is not None and _IN_CALL.get():
            if left == 0:
                raise Killed
            left -= 1
        await put_if(key, value, revision)

    if writes is not None:
        mirror.put_if = counted  # type: ignore[method-assign]
    token = _IN_CALL.set(True)
    try:
        yield
    finally:
        _IN_CALL.reset(token)
        mirror.put_if = put_if  # type: ignore[method-assign]


async def _live(nats_url: str, calls: list[tuple[str, int, int, int | None]]) -> None:
    name = f"run-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:
        async with (
            connect_to(nats_url) as bucket,
            instance(nats_url, name) as one,
            instance(nats_url, name) as two,
        ):
            world = World(Path(folder), name, bucket, (one, two))
            world.watch_writes()
            await one.versions.publish(world.made[0])
            for call in calls:
                await world.call(*call)
                await world.observe()
            await until(lambda: one.state.records == two.state.records and one.state.live == two.state.live)
            await until(lambda: one.versions.is_settled() and two.versions.is_settled())
            found = await world.observe()
            newest_first = [found[version] for version in sorted(found, reverse=True)]
            assert next_live(newest_first, world.story.pointer) is None, "one instance finishes what was begun"


@contextlib.asynccontextmanager
async def connect_to(nats_url: str):  # type: ignore[no-untyped-def]
    async with await connect(nats_url, "look") as broker:
        yield await Bucket.open(broker, VERSIONS_BUCKET)


@pytest.mark.timeout(300)
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(calls=st.lists(CALL, min_size=1, max_size=25))
def test_kv_tells_one_story(nats_url: str, calls: list[tuple[str, int, int, int | None]]) -> None:
    asyncio.run(_live(nats_url, calls))


@settings(max_examples=300, deadline=None)
@given(
    versions=st.lists(st.tuples(st.sampled_from(VersionState), st.integers(1, 3)), min_size=1, max_size=12),
    live=st.integers(-1, 12),
    after=st.integers(0, 12),
    upto=st.integers(0, 12),
)
def test_what_goes_live_next_is_good_newer_and_not_withdrawn(
    versions: list[tuple[VersionState, int]], live: int, after: int, upto: int
) -> None:
    own = {VersionState.LIVE: VersionState.VERIFIED, VersionState.RETIRED: VersionState.VERIFIED}
    found = [
        Record(number, number * stride, "", own.get(state, state)) for number, (state, stride) in enumerate(versions)
    ][::-1]
    pointer = Live(version=live, step=live, gate_step=live, withdrawn=((after, upto),))
    chosen = next_live(found, pointer)
    able = [
        r.version
        for r in found
        if r.version > live and r.state is VersionState.VERIFIED and not after < r.version <= upto
    ]
    assert (chosen.version if chosen else None) == max(able, default=None)
