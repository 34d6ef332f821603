"""Versions in KV on a real NATS: every state, two instances at once, refusals that change nothing."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.servers.sync_instances import CANARY, base_manifest, instance, make_manifest, measured, until
from trinity.runtime.broker import Bucket, Changes
from trinity.runtime.errors import Conflict, InvalidInput, NotFound
from trinity.sync.lifecycle import Versions
from trinity.sync.runs import Run
from trinity.sync.versions import GoLive, Register, Reject, Verify
from trinity.weights.manifest import Delta, FileInfo, FolderOffer, Manifest, S3Offer, TensorInfo
from trinity.weights.wire import VersionState

pytestmark = pytest.mark.core


@pytest.fixture
async def run(nats_url: str) -> AsyncIterator[Run]:
    async with instance(nats_url) as opened:
        yield opened


async def publish(run: Run, manifest: Manifest) -> None:
    await run.versions.publish(manifest)


def states(run: Run) -> list[tuple[int, VersionState]]:
    return [(judged.record.version, judged.state) for judged in run.versions.all()]


async def test_a_version_lives_from_staged_to_retired(run: Run, tmp_path: Path) -> None:
    assert run.state.live.version == -1
    assert (await run.versions.publish(base_manifest())).state is VersionState.LIVE
    assert (await run.versions.publish(make_manifest(tmp_path, 1))).state is VersionState.LIVE
    assert states(run) == [(1, VersionState.LIVE), (0, VersionState.RETIRED)]
    assert run.state.live.gate_step == 1


async def test_publishing_again_changes_nothing(run: Run, tmp_path: Path) -> None:
    made = make_manifest(tmp_path, 1)
    first = await run.versions.publish(made)
    assert await run.versions.publish(made) == first
    await publish(run, make_manifest(tmp_path, 2))
    assert (await run.versions.publish(made)).state is VersionState.RETIRED, "the answer to a call that was lost"


async def test_a_staged_version_goes_live_when_it_is_verified(run: Run, tmp_path: Path) -> None:
    await publish(run, base_manifest())
    assert (await run.versions.publish(make_manifest(tmp_path, 1, canary=True))).state is VersionState.STAGED
    assert run.state.live.version == 0
    await run.versions.apply(1, Verify(measured(1)))
    assert (await run.versions.get(1)).state is VersionState.LIVE


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
async def test_damaged_files_are_rejected_by_name_and_never_go_live(run: Run, tmp_path: Path, damage: str) -> None:
    await publish(run, base_manifest())
    made = make_manifest(tmp_path, 1)
    path = tmp_path / "v1/part.safetensors"
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-4] if damage == "truncate" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(InvalidInput, match=r"part\.safetensors"):
        await run.versions.publish(made)
    assert (await run.versions.get(1)).state is VersionState.REJECTED
    with pytest.raises(Conflict, match="REJECTED"):
        await run.versions.publish(made)
    assert run.state.live.version == 0
    assert run.state.live.gate_step == 1, "the gate does not wait for the weights of a step that were rejected"


async def test_files_of_another_content_under_one_number_are_compared_too(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that has lost the run makes a version; then its successor does."""

    async def refuse(_: Versions, event: Register) -> None:
        raise Conflict("another trainer has taken the run over since")

    await publish(run, base_manifest())
    with monkeypatch.context() as patched, pytest.raises(Conflict, match="another trainer"):
        patched.setattr(Versions, "_register", refuse)
        await publish(run, make_manifest(tmp_path, 1))
    successor = replace(make_manifest(tmp_path, 1), created_at_seconds=2.0)
    (tmp_path / "v1/part.safetensors").write_bytes(b"damaged")
    with pytest.raises(InvalidInput, match=r"part\.safetensors"):
        await publish(run, successor)
    assert run.state.live.version == 0


WEIGHT = TensorInfo("w", "F32", (2, 2), 16, "part.safetensors")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tensors": ()}, "manifest.tensors"),
        ({"offers": ()}, "manifest.offers"),
        ({"files": ()}, "manifest.tensors"),
        ({"version": -1}, "manifest.version"),
        ({"files": (FileInfo("../part.safetensors", 1, "x"),),
          "tensors": (replace(WEIGHT, file="../part.safetensors"),)}, "manifest.files"),
        ({"tensors": (WEIGHT, WEIGHT)}, "listed twice"),
        ({"tensors": (replace(WEIGHT, size_bytes=12),)}, r"w has 12 bytes; F32 \[2, 2\] has 16"),
        ({"tensors": (replace(WEIGHT, name="x"),)}, "manifest.tensors: lacks w, unlike version 1"),
        ({"tensors": (WEIGHT, replace(WEIGHT, name="x"))}, "manifest.tensors: has the new x"),
        ({"tensors": (replace(WEIGHT, shape=(4,)),)}, r"w is F32 \[4\], in version 1 it is F32 \[2, 2\]"),
        ({"tensors": (replace(WEIGHT, dtype="I32"),)}, r"w is I32 \[2, 2\], in version 1 it is F32"),
        ({"delta": Delta(7, ()), "version": 9}, r"manifest\.delta\.base_version: is 7, which this run does not have"),
        ({"delta": Delta(2, ())}, r"manifest\.delta\.base_version: is 2; must be below version 2"),
        ({"offers": (FolderOffer("/nowhere/v2"),)}, "/nowhere/v2 is no folder that the sync service sees"),
        ({"canary": replace(CANARY, probes=())}, r"manifest\.canary\.probes: is empty"),
    ],
)  # fmt: skip
async def test_a_manifest_that_cannot_be_right_is_refused_by_name(
    run: Run, tmp_path: Path, change: dict[str, object], field: str
) -> None:
    await publish(run, make_manifest(tmp_path, 1))
    before = await run.state.pointer(), dict(run.state.records)
    with pytest.raises(InvalidInput, match=field):
        await run.versions.publish(replace(make_manifest(tmp_path, 2), **change))  # type: ignore[arg-type]
    assert (await run.state.pointer(), run.state.records) == before


async def test_tensors_are_not_compared_with_a_version_that_was_rejected(run: Run, tmp_path: Path) -> None:
    await publish(run, base_manifest())
    wrong = replace(make_manifest(tmp_path, 1, canary=True), tensors=(replace(WEIGHT, shape=(4,)),))
    await run.versions.publish(wrong)
    await run.versions.apply(1, Reject("for the test"))
    await publish(run, make_manifest(tmp_path, 2))
    with pytest.raises(InvalidInput, match=r"in version 2 it is F32 \[2, 2\]"):
        await run.versions.publish(replace(make_manifest(tmp_path, 3), tensors=wrong.tensors))


async def test_versions_are_new_and_never_change(run: Run, tmp_path: Path) -> None:
    await run.versions.publish(make_manifest(tmp_path, 2))
    with pytest.raises(Conflict, match="must be newer than 2"):
        await run.versions.publish(make_manifest(tmp_path, 1))
    with pytest.raises(Conflict, match="another content"):
        await run.versions.publish(replace(make_manifest(tmp_path, 2), step=5))
    with pytest.raises(NotFound):
        await run.versions.get(7)


async def test_an_older_version_does_not_go_live_over_a_newer_one(run: Run, tmp_path: Path) -> None:
    await publish(run, make_manifest(tmp_path, 1, canary=True))
    await publish(run, make_manifest(tmp_path, 2))
    await run.versions.apply(1, Verify(measured(1)))
    assert states(run) == [(2, VersionState.LIVE), (1, VersionState.RETIRED)]
    with pytest.raises(Conflict, match="1 is RETIRED; only a VERIFIED version goes LIVE"):
        await run.versions.apply(1, GoLive())


async def test_a_delta_needs_a_base_that_is_good_and_there(run: Run, tmp_path: Path) -> None:
    await publish(run, make_manifest(tmp_path, 1))
    await run.versions.publish(make_manifest(tmp_path, 2, canary=True))
    await run.versions.apply(2, Reject("for the test"))
    with pytest.raises(Conflict, match=r"base_version: 2 is REJECTED \(for the test\)"):
        await run.versions.publish(make_manifest(tmp_path, 3, base=2))
    await run.state.change_record(1, lambda record: replace(record, collected=True))
    with pytest.raises(Conflict, match="the files of 1 may be deleted already"):
        await run.versions.publish(make_manifest(tmp_path, 3, base=1))
    assert (await run.versions.publish(make_manifest(tmp_path, 3))).state is VersionState.LIVE


async def test_files_that_this_host_does_not_see_need_a_canary(run: Run, tmp_path: Path) -> None:
    unseen = replace(make_manifest(tmp_path, 1), offers=(FolderOffer("/nowhere/v1"),))
    assert (await run.versions.publish(replace(unseen, canary=CANARY))).state is VersionState.STAGED
    elsewhere = replace(make_manifest(tmp_path, 2), offers=(S3Offer("bucket", "v2"), FolderOffer("/nowhere/v2")))
    assert (await run.versions.publish(elsewhere)).state is VersionState.LIVE


async def test_the_gate_goes_on_over_rejected_versions_but_waits_for_one_that_may_come(
    run: Run, tmp_path: Path
) -> None:
    await publish(run, make_manifest(tmp_path, 1))
    for number in (2, 3, 4):
        await publish(run, make_manifest(tmp_path, number, canary=True))
    await run.versions.apply(4, Reject("for the test"))
    assert run.state.live.gate_step == 1
    await run.versions.apply(2, Reject("for the test"))
    assert run.state.live.gate_step == 2, "version 3 may still come"
    await run.versions.apply(3, Reject("for the test"))
    assert run.state.live.gate_step == 4


async def test_two_instances_have_one_truth(run: Run, nats_url: str, tmp_path: Path) -> None:
    async with instance(nats_url) as two:
        for number in range(1, 9):
            item = make_manifest(tmp_path, number)
            found = await asyncio.gather(run.versions.publish(item), two.versions.publish(item))
            assert found[0].record.digest == found[1].record.digest
        await until(lambda: run.versions.all() == two.versions.all())
        assert states(run) == [(8, VersionState.LIVE)] + [(n, VersionState.RETIRED) for n in range(7, 0, -1)]


async def test_two_contents_of_one_number_are_never_both_taken_in(run: Run, nats_url: str, tmp_path: Path) -> None:
    async with instance(nats_url) as two:
        for number in range(1, 6):
            item = make_manifest(tmp_path, number)
            other = replace(item, created_at_seconds=2.0)
            found = await asyncio.gather(
                run.versions.publish(item), two.versions.publish(other), return_exceptions=True
            )
            refused = [answer for answer in found if isinstance(answer, Conflict)]
            assert len(refused) == 1, found


async def test_what_an_instance_left_half_done_is_finished_by_another(run: Run, nats_url: str, tmp_path: Path) -> None:
    await publish(run, make_manifest(tmp_path, 1))
    await run.versions.publish(make_manifest(tmp_path, 2, canary=True))
    # As if `run` had been killed between the record and the pointer.
    await run.state.change_record(2, lambda record: replace(record, state=VersionState.VERIFIED))
    async with instance(nats_url) as two:
        await until(lambda: two.state.live.version == 2)
        assert (await two.versions.get(1)).record.was_live


async def test_an_unreadable_record_stops_neither_the_service_nor_the_run(run: Run, tmp_path: Path) -> None:
    await run.state.mirror._bucket.put_if(run.state.names.version_key(1), b"\x0a\x03run", 0)
    await publish(run, make_manifest(tmp_path, 2))
    assert run.state.live.version == 2


async def test_the_gate_waits_for_a_version_that_this_instance_has_not_heard_of_yet(
    run: Run, nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows a newer one by its own look: the one between may still come."""
    told, follow = asyncio.Event(), Bucket.follow

    async def late(bucket: Bucket, *arguments: Any) -> AsyncIterator[Changes]:
        async for changes in follow(bucket, *arguments):
            yield changes
            await told.wait()

    await publish(run, make_manifest(tmp_path, 1))
    monkeypatch.setattr(Bucket, "follow", late)
    async with instance(nats_url) as two:
        for number in (2, 3):
            await publish(run, make_manifest(tmp_path, number, canary=True))
        rejecting = asyncio.create_task(two.versions.apply(3, Reject("for the test")))
        await asyncio.sleep(0.5)
        assert 2 not in two.state.records
        assert (await run.state.pointer()).gate_step == 1
        told.set()
        await asyncio.wait_for(rejecting, 10)
        assert (await run.state.pointer()).gate_step == 1
        await two.versions.apply(2, Reject("for the test"))
        assert (await run.state.pointer()).gate_step == 3


async def test_a_version_that_was_overtaken_unjudged_is_not_taken_for_a_good_one(run: Run, tmp_path: Path) -> None:
    await publish(run, make_manifest(tmp_path, 1, canary=True))
    await publish(run, make_manifest(tmp_path, 2))
    assert states(run) == [(2, VersionState.LIVE), (1, VersionState.STAGED)]
    await run.versions.apply(1, Verify(measured(1)))
    assert states(run) == [(2, VersionState.LIVE), (1, VersionState.RETIRED)]
