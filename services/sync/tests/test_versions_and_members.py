"""Versions and members in KV on a real NATS: every state, two services at once, refusals that change nothing."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from trinity.runtime import files
from trinity.runtime.broker import Broker, Bucket, connect
from trinity.runtime.errors import AlreadyExists, Conflict, InvalidInput, NotFound
from trinity.runtime.weights import FileInfo, FolderOffer, Manifest, TensorInfo, VersionState
from trinity.sync.members import Capabilities, Member, Members
from trinity.sync.versions import Versions


@pytest.fixture
async def broker(nats_url: str) -> AsyncIterator[Broker]:
    async with await connect(nats_url, "test") as connected:
        yield connected


@pytest.fixture
async def versions(broker: Broker) -> Versions:
    return Versions(await Bucket.open(broker, "v"), "run")


def base() -> Manifest:
    return Manifest("run", 0, 0, (), (), (), 1.0, "model")


def manifest(folder: Path, version: int) -> Manifest:
    place = folder / f"v{version}"
    place.mkdir(exist_ok=True)
    save_file({"w": np.full((2, 2), version, np.float32)}, place / "part.safetensors")
    info = FileInfo("part.safetensors", (place / "part.safetensors").stat().st_size, "")
    info = replace(info, checksum=files.checksum(place / "part.safetensors"))
    tensors = (TensorInfo("w", "F32", (2, 2), 16, "part.safetensors"),)
    return Manifest("run", version, version, tensors, (info,), (FolderOffer(str(place)),), 1.0)


async def test_a_version_lives_from_staged_to_retired(versions: Versions, tmp_path: Path) -> None:
    assert (await versions.live()).version == -1
    assert (await versions.stage(base())).state is VersionState.VERIFIED
    await versions.commit(0)
    assert (await versions.get(0)).state is VersionState.LIVE
    await versions.stage(manifest(tmp_path, 1))
    assert (await versions.get(1)).state is VersionState.VERIFIED
    await versions.commit(1)
    assert [(v.manifest.version, v.state) for v in await versions.all()] == [
        (1, VersionState.LIVE),
        (0, VersionState.RETIRED),
    ]


async def test_staging_and_committing_again_changes_nothing(versions: Versions, tmp_path: Path) -> None:
    made = manifest(tmp_path, 1)
    first = await versions.stage(made)
    assert await versions.stage(made) == first
    assert await versions.commit(1) == await versions.commit(1)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
async def test_damaged_files_are_rejected_by_name_and_never_go_live(
    versions: Versions, tmp_path: Path, damage: str
) -> None:
    await versions.stage(base())
    await versions.commit(0)
    made = manifest(tmp_path, 1)
    path = tmp_path / "v1/part.safetensors"
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-4] if damage == "truncate" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(InvalidInput, match=r"part\.safetensors"):
        await versions.stage(made)
    assert (await versions.get(1)).state is VersionState.REJECTED
    with pytest.raises(Conflict, match="REJECTED"):
        await versions.commit(1)
    assert (await versions.live()).version == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tensors": ()}, "manifest.tensors"),
        ({"offers": ()}, "manifest.offers"),
        ({"files": ()}, "manifest.tensors"),
        ({"version": -1}, "manifest.version"),
        ({"files": (FileInfo("../part.safetensors", 1, "x"),),
          "tensors": (TensorInfo("w", "F32", (1,), 4, "../part.safetensors"),)}, "manifest.files"),
        ({"tensors": (TensorInfo("w", "F32", (1,), 4, "part.safetensors"),) * 2}, "manifest.tensors"),
    ],
)  # fmt: skip
async def test_a_manifest_that_contradicts_itself_is_refused(
    versions: Versions, tmp_path: Path, change: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidInput, match=field):
        await versions.stage(replace(manifest(tmp_path, 1), **change))  # type: ignore[arg-type]
    assert await versions.all() == []


async def test_versions_are_new_and_never_change(versions: Versions, tmp_path: Path) -> None:
    await versions.stage(manifest(tmp_path, 2))
    with pytest.raises(Conflict, match="must be newer than 2"):
        await versions.stage(manifest(tmp_path, 1))
    with pytest.raises(Conflict, match="another content"):
        await versions.stage(replace(manifest(tmp_path, 2), step=5))
    with pytest.raises(NotFound):
        await versions.commit(7)


async def test_an_older_version_does_not_go_live_over_a_newer_one(versions: Versions, tmp_path: Path) -> None:
    for number in (1, 2):
        await versions.stage(manifest(tmp_path, number))
    await versions.commit(2)
    with pytest.raises(Conflict, match="older than 2"):
        await versions.commit(1)


async def test_two_services_have_one_truth(broker: Broker, tmp_path: Path) -> None:
    one, two = Versions(await Bucket.open(broker, "v"), "run"), Versions(await Bucket.open(broker, "v"), "run")
    made = [manifest(tmp_path, number) for number in range(1, 9)]
    for number, item in enumerate(made, start=1):
        states = await asyncio.gather(one.stage(item), two.stage(item))
        assert states[0] == states[1]
        await asyncio.gather(one.commit(number), two.commit(number))
    assert await one.all() == await two.all()
    assert [v.state for v in await one.all()] == [VersionState.LIVE] + [VersionState.RETIRED] * 7


def member(name: str = "a", pid: int = 1) -> Member:
    return Member(name, "", pid, "host", "127.0.0.1:1", "model", Capabilities(("folder",), "float32"))


async def test_a_lease_is_renewed_by_reports_and_runs_out_without(broker: Broker) -> None:
    members = Members(await Bucket.open(broker, "m"), "run", lease_seconds=1.0)
    joined = await members.join(member())
    for _ in range(3):
        await asyncio.sleep(0.5)
        await members.report("a", joined.lease_id, version=3)
    assert [(m.explorer_id, m.version) for m in await members.all()] == [("a", 3)]
    await asyncio.sleep(1.2)
    assert await members.all() == []
    with pytest.raises(NotFound, match="join again"):
        await members.report("a", joined.lease_id)


async def test_a_name_is_taken_as_long_as_its_lease_lives(broker: Broker) -> None:
    members = Members(await Bucket.open(broker, "m"), "run", lease_seconds=1.0)
    await members.join(member(pid=1))
    with pytest.raises(AlreadyExists, match=r"explorer\.name must differ"):
        await members.join(member(pid=2))
    await members.join(member(pid=1))  # the same process comes back
    await asyncio.sleep(1.2)
    await members.join(member(pid=2))


async def test_who_leaves_is_gone(broker: Broker) -> None:
    members = Members(await Bucket.open(broker, "m"), "run", lease_seconds=10.0)
    joined = await members.join(member())
    await members.leave("a")
    with pytest.raises(NotFound):
        await members.find(joined.lease_id)
    with pytest.raises(InvalidInput, match="explorer_id"):
        await members.join(member(name=""))
