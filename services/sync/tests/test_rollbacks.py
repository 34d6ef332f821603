"""An older version LIVE again and newer ones withdrawn, whichever process is killed meanwhile."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.servers.sync_instances import RUN, base_manifest, instance, make_manifest, make_member, measured, until
from trinity.runtime.broker import connect
from trinity.runtime.errors import Conflict, NotFound
from trinity.runtime.names import MANIFESTS_BUCKET
from trinity.sync import lifecycle
from trinity.sync.runs import Run
from trinity.sync.store.records import Record
from trinity.sync.versions import Pin, RollBack, Verify, needed, transition
from trinity.weights.pointer import MOST_ROLLBACKS, Live, Rollback, decode_live, encode
from trinity.weights.wire import VersionState

pytestmark = pytest.mark.core


@pytest.fixture
async def run(nats_url: str, tmp_path: Path) -> AsyncIterator[Run]:
    """Versions 0 to 5 were LIVE in turn; 6 waits for its canary."""
    async with instance(nats_url) as opened:
        await opened.versions.publish(base_manifest())
        for version in range(1, 6):
            await publish(opened, tmp_path, version)
        await publish(opened, tmp_path, 6, canary=True)
        yield opened


async def publish(run: Run, folder: Path, version: int, *, canary: bool = False, base: int = -1) -> None:
    await run.versions.publish(make_manifest(folder, version, canary=canary, base=base))


async def roll_back(run: Run, version: int) -> Rollback | None:
    return await run.versions.roll_back(version, keep_experience=False, reason="bad rewards")


def states(run: Run) -> dict[int, VersionState]:
    return {judged.record.version: judged.state for judged in run.versions.all()}


async def test_an_older_version_is_live_again_and_all_newer_ones_are_withdrawn(run: Run, tmp_path: Path) -> None:
    done = await roll_back(run, 3)
    assert done is not None
    assert (done.number, done.version, done.newest_step, done.keep_experience) == (1, 3, 6, False)
    assert run.withdrawn_by(done) == [4, 5, 6]
    assert states(run)[3] is VersionState.LIVE
    assert {states(run)[version] for version in (4, 5, 6)} == {VersionState.REJECTED}
    assert (await run.versions.get(5)).reason == "withdrawn by a rollback to version 3: bad rewards"
    assert run.state.live.gate_step == 6, "the gate does not wait for the weights of steps that were withdrawn"
    await publish(run, tmp_path, 7)
    assert (run.state.live.version, run.state.live.gate_step) == (7, 7)


async def test_each_rollback_withdraws_what_no_earlier_one_did(run: Run) -> None:
    await roll_back(run, 3)
    second = await roll_back(run, 1)
    assert second is not None
    assert run.withdrawn_by(second) == [2, 3]
    assert run.withdrawn() == [2, 3, 4, 5, 6]


async def test_a_withdrawn_version_never_comes_back(run: Run, tmp_path: Path) -> None:
    await roll_back(run, 3)
    await run.versions.apply(6, Verify(measured(6)))
    for version in (4, 5, 6):
        with pytest.raises(Conflict, match="withdrawn by a rollback to version 3"):
            await run.versions.publish(make_manifest(tmp_path, version, canary=version == 6))
        with pytest.raises(Conflict, match="REJECTED"):
            await roll_back(run, version)
    with pytest.raises(Conflict, match="5 exists with another content"):
        await run.versions.publish(replace(make_manifest(tmp_path, 5), created_at_seconds=9.0))
    assert run.state.live.version == 3


async def test_rolling_back_again_changes_nothing(run: Run) -> None:
    first = await roll_back(run, 3)
    pointer = await run.state.pointer()
    assert await roll_back(run, 3) == first
    assert await run.state.pointer() == pointer


async def test_to_what_is_live_without_any_rollback_changes_nothing(run: Run) -> None:
    pointer = await run.state.pointer()
    assert await roll_back(run, 5) is None
    assert await run.state.pointer() == pointer
    assert states(run)[6] is VersionState.STAGED


async def test_to_the_base_model(run: Run) -> None:
    assert (await roll_back(run, 0)) is not None
    assert run.state.live.version == 0
    assert {version for version, state in states(run).items() if state is VersionState.REJECTED} == set(range(1, 7))


async def test_what_cannot_be_gone_back_to_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    pointer = await run.state.pointer()
    with pytest.raises(NotFound, match="no version 9"):
        await roll_back(run, 9)
    with pytest.raises(Conflict, match="6 is newer than 5"):
        await roll_back(run, 6)
    shutil.rmtree(tmp_path / "v3")
    with pytest.raises(Conflict, match=r"files of 3 are gone from .*v3"):
        await roll_back(run, 3)
    await run.state.change_record(2, lambda record: replace(record, collected=True))
    with pytest.raises(Conflict, match="files of 2 are gone"):
        await roll_back(run, 2)
    await run.state.change_record(1, lambda record: replace(record, was_live=False))
    with pytest.raises(Conflict, match="1 never was LIVE"):
        await roll_back(run, 1)
    assert await run.state.pointer() == pointer


async def test_weights_that_do_not_follow_the_rollback_are_refused(run: Run, tmp_path: Path) -> None:
    await run.versions.publish(make_manifest(tmp_path, 7), rollback=0)
    await roll_back(run, 3)
    with pytest.raises(Conflict, match="rolled back to version 3, which these weights do not follow"):
        await run.versions.publish(make_manifest(tmp_path, 8), rollback=0)
    await run.versions.publish(make_manifest(tmp_path, 8), rollback=1)


async def test_one_that_was_killed_before_the_pointer_moved_is_done_by_asking_again(run: Run, nats_url: str) -> None:
    live = await run.state.pointer()
    await run.state.change_record(3, lambda record: transition(live, record, RollBack())[1])
    async with instance(nats_url) as two:
        assert two.state.live.version == 5
        assert await two.versions.collect([], 1) == [1, 2, 4], "the files it needs stay meanwhile"
        done = await roll_back(two, 3)
        assert done is not None and done.number == 1
        await until(lambda: run.state.live.version == 3)


async def test_several_at_once_happen_one_after_the_other(run: Run, nats_url: str) -> None:
    async with instance(nats_url) as two:
        found = await asyncio.gather(roll_back(run, 4), roll_back(two, 2), return_exceptions=True)
        live = await run.state.pointer()
        assert live.version == 2
        assert live.is_withdrawn(4)
        assert [rollback.number for rollback in live.rollbacks] == list(range(1, len(live.rollbacks) + 1))
        assert not isinstance(found[1], Exception)


def test_the_pointer_forgets_no_withdrawn_version() -> None:
    live, withdrawn = Live(version=0, step=0, gate_step=0, newest_version=0, newest_step=0), set[int]()
    for number in range(1, 60):
        newest = number * 3
        live = replace(live, version=newest, step=newest, newest_version=newest, newest_step=newest)
        to = newest - 2 if number % 4 else newest - 4
        if live.is_withdrawn(to):
            to = newest - 2
        live, _ = transition(live, Record(to, to, "", VersionState.VERIFIED, was_live=True), RollBack(True, "x"))
        withdrawn |= set(range(to + 1, newest + 1))
        assert {v for v in range(newest + 5) if live.is_withdrawn(v)} == withdrawn
        assert decode_live(encode(live)) == live
    assert [rollback.number for rollback in live.rollbacks] == list(range(60 - MOST_ROLLBACKS, 60))


def test_a_pointer_of_an_older_writer_can_be_read() -> None:
    live = decode_live(json.dumps({"version": 4, "step": 8, "of_a_newer_writer": 1}).encode())
    assert (live.version, live.step, live.gate_step, live.newest_version) == (4, 8, 8, 4)
    assert decode_live(b"") == Live()


async def test_pinned_files_stay(run: Run) -> None:
    await run.versions.apply(1, Pin(True))
    assert await run.versions.collect([], 1) == [2, 3, 4]
    await run.versions.apply(1, Pin(False))
    assert await run.versions.collect([], 1) == [1, 2, 3, 4], "told again, for a trainer that died before it deleted"
    with pytest.raises(Conflict, match="files of 2 may be deleted already"):
        await run.versions.apply(2, Pin(True))
    with pytest.raises(NotFound):
        await run.versions.apply(9, Pin(True))
    assert (await roll_back(run, 0)) is not None, "the base model has no files to lose"


async def test_files_that_an_explorer_holds_or_a_delta_needs_stay(run: Run, tmp_path: Path) -> None:
    assert await run.versions.collect([2], 3) == [1]
    await publish(run, tmp_path, 7, base=4)
    await publish(run, tmp_path, 8, base=7)
    await publish(run, tmp_path, 9, base=8)
    assert await run.versions.collect([], 1) == [1, 2, 3, 5, 6], "9 needs 8, that 7, and that 4"


async def test_a_released_version_loses_its_manifest_when_lists_leave_it_out(
    run: Run, nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests of thousands of versions would fill NATS."""
    monkeypatch.setattr(lifecycle, "LISTED", 2)
    await run.versions.apply(1, Pin(True))
    assert await run.versions.collect([], 1) == [2, 3, 4]
    assert await stored(nats_url) == [0, 1, 5, 6]
    problem = (await run.manifests.encoded_or_problem(run.state.records[3]))[1]
    assert problem == "version: the files and the manifest of version 3 were deleted"
    await publish(run, tmp_path, 7)
    assert 5 in await run.versions.collect([], 1)
    assert await stored(nats_url) == [0, 1, 6, 7], "lists give 6 in full, though it was released"
    await publish(run, tmp_path, 8)
    await run.versions.collect([], 1)
    assert await stored(nats_url) == [0, 1, 7, 8]
    await run.canaries.measured(make_member(), measured(6))  # of an explorer that had loaded it before


async def stored(nats_url: str) -> list[int]:
    """Versions with a manifest, which is the only message of its key; a deleted key has an empty one."""
    async with await connect(nats_url, "look") as broker:
        stream = f"KV_{MANIFESTS_BUCKET}"
        info = await broker.js.stream_info(stream, subjects_filter=f"$KV.{MANIFESTS_BUCKET}.{RUN}.>")
        subjects = info.state.subjects or {}
        assert set(subjects.values()) == {1}
        found = {int(key.split(".")[-2]): await broker.js.get_last_msg(stream, key) for key in subjects}
        return sorted(version for version, message in found.items() if message.data)


def test_the_newest_good_ones_stay_and_bad_ones_do_not_count() -> None:
    def record(version: int, good: bool = True) -> Record:
        return Record(version, version, "", VersionState.VERIFIED if good else VersionState.REJECTED)

    found = [record(9, False), record(8), record(7, False), record(6), record(5), record(4, False), record(3)]
    assert needed(found, Live(version=8), (), 2) == {9, 8, 7, 6}
    assert needed(found, Live(version=8), (3,), 1) == {9, 8, 3}
    withdrawn = Live(version=5, newest_version=9, withdrawn=((5, 9),))
    assert needed(found, withdrawn, (), 1) == {9, 8, 7, 6, 5}


async def test_old_records_of_released_versions_are_deleted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "RECORDED", 3)
    await run.versions.apply(2, Pin(True))
    await run.versions.collect([], 1)
    await until(lambda: sorted(states(run)) == [0, 2, 4, 5, 6])
    with pytest.raises(NotFound):
        await run.versions.get(1)
    assert states(run)[5] is VersionState.LIVE and await roll_back(run, 2) is not None
