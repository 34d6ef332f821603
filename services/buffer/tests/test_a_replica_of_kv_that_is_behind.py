"""What the buffer says of versions while KV is behind: a replica after its leader's death, a pointer that sync is about
to move, a store that lost its newest writes."""

import asyncio
import json
import time
from typing import Any, cast

import pytest

from trinity.buffer.state import context as state
from trinity.buffer.state.context import LiveVersions, RunContext
from trinity.runtime.broker import ABSENT, Bucket, Entry
from trinity.runtime.names import RunNames
from trinity.weights.pointer import Live, encode
from trinity.weights.wire import VersionState

pytestmark = pytest.mark.core

NAMES = RunNames("run-1")
LAG_SECONDS = 0.3


class Replica:
    """Answers with `before` until a while after there is a leader, and with `now` from then on."""

    def __init__(self, before: Live, now: Live) -> None:
        self._before, self._now = before, now
        self.led_at = float("inf")

    async def get(self, key: str) -> Entry:
        if key != NAMES.live_key:
            return ABSENT
        is_behind = time.monotonic() < self.led_at + LAG_SECONDS
        return Entry(encode(self._before if is_behind else self._now), 1 if is_behind else 2)

    async def leader_sequence(self) -> int:
        self.led_at = min(self.led_at, time.monotonic())
        return 7


def versions_of(replica: Replica) -> LiveVersions:
    return LiveVersions(RunContext(cast(Any, None), NAMES, cast(Any, None)), cast(Bucket, replica))


async def test_a_version_that_is_live_is_known_before_a_group_of_it_is_refused() -> None:
    versions = versions_of(Replica(Live(1, 1, 1), Live(2, 2, 2)))
    assert await versions.was_live(2)
    assert not await versions.was_live(3)


async def test_a_gate_whose_version_was_rejected_is_known_before_a_group_is_refused() -> None:
    versions = versions_of(Replica(Live(1, 1, 1), Live(1, 1, 2)))
    assert await versions.meets(1, 2)
    assert not await versions.meets(1, 3)


async def test_groups_that_are_refused_hold_up_the_log_once_for_each_write() -> None:
    versions = versions_of(Replica(Live(1, 1, 1), Live(2, 2, 2)))
    assert not await versions.was_live(3)
    begin = time.monotonic()
    for version in range(4, 24):
        assert not await versions.was_live(version)
    assert time.monotonic() - begin < 20 * LAG_SECONDS, "one wait takes ten times as long"


async def test_the_pointer_does_not_go_back() -> None:
    replica = Replica(Live(1, 1, 1), Live(2, 2, 2))
    versions = versions_of(replica)
    replica.led_at = 0.0
    assert (await versions.look()).version == 2
    replica.led_at = float("inf")  # another replica answers
    assert (await versions.look()).version == 2


class OneServer:
    """A bucket on one server: the pointer, and the verdicts in the records of versions."""

    def __init__(self, live: int, **verdicts: VersionState) -> None:
        self.live = live
        self._records = {NAMES.version_key(int(name[1:])): verdict for name, verdict in verdicts.items()}

    async def get(self, key: str) -> Entry:
        if key == NAMES.live_key:
            return Entry(encode(Live(self.live, self.live, self.live)), 1 + self.live)
        verdict = self._records.get(key)
        return ABSENT if verdict is None else Entry(json.dumps({"state": verdict}).encode(), 1)

    async def leader_sequence(self) -> None:
        return None


@pytest.mark.parametrize(
    ("verdict", "may_sample"),
    [(VersionState.VERIFIED, True), (VersionState.STAGED, False), (VersionState.REJECTED, False)],
)
async def test_a_group_may_be_read_between_the_record_of_its_version_and_the_pointer(
    verdict: VersionState, may_sample: bool
) -> None:
    versions = versions_of(cast(Replica, OneServer(1, v2=verdict)))
    assert await versions.was_live(2) is may_sample
    assert not await versions.was_live(3)


async def test_an_old_group_waits_for_a_version_that_the_store_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_RETURN_SECONDS", 0.2)
    server = OneServer(1)
    context = RunContext(cast(Any, None), NAMES, cast(Any, None))
    versions = LiveVersions(context, cast(Bucket, server))
    judged = asyncio.create_task(versions.returns(3))
    await asyncio.sleep(0.3)
    assert not judged.done(), "the trainer is learning the steps of the ledger again"
    assert "version 3" in context.holds and "knows is 1" in context.holds
    server.live = 3
    assert await asyncio.wait_for(judged, 2)
    assert not context.holds
    async with context.wanted(5):
        assert not await asyncio.wait_for(versions.returns(4), 2), "nothing is left that could bring it back"
    assert not context.holds
