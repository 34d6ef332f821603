"""Folders of versions are recorded relative to the job folder, so a moved or copied job folder keeps its versions."""

import shutil
from pathlib import Path

import pytest

from support.servers.sync_instances import RUN, base_manifest, instance, make_manifest, served
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.runtime.errors import Conflict
from trinity.sync.runs import Run
from trinity.weights.wire import VersionState

pytestmark = pytest.mark.core


async def publish(run: Run, job: Path, *versions: int) -> None:
    for version in versions:
        await run.versions.publish(make_manifest(job / "weights", version))


async def folder(run: Run, version: int) -> Path | None:
    return (await run.manifests.get(await run.state.record(version))).folder


async def test_a_copy_reads_its_own_versions_also_while_the_original_exists(nats_url: str, tmp_path: Path) -> None:
    original, copy = tmp_path / "a" / "job", tmp_path / "b" / "of another name"
    async with instance(nats_url, job_folder=original) as run:
        await run.versions.publish(base_manifest())
        await publish(run, original, 1, 2)
        assert await folder(run, 2) == original / "weights" / "v2"
    shutil.copytree(original, copy)
    async with instance(nats_url, job_folder=copy) as run:
        assert await folder(run, 2) == copy / "weights" / "v2"
        shutil.rmtree(original)
        await publish(run, copy, 2, 3)  # 2 again, as a trainer does after a crash
        done = await run.versions.roll_back(1, keep_experience=False, reason="")
        assert done is not None and done.version == 1
    async with served(nats_url, job_folder=copy) as stub:
        shutil.rmtree(copy / "weights" / "v2")
        listed = (await stub.ListVersions(pb.ListVersionsRequest(run=RUN), timeout=20)).versions
        assert {one.manifest.version: one.files_gone for one in listed} == {3: False, 2: True, 1: False, 0: False}
        assert listed[0].manifest.offers[0].folder.path == str(copy / "weights" / "v3")


async def test_records_with_absolute_folders_are_found_in_the_copy(nats_url: str, tmp_path: Path) -> None:
    """Earlier versions recorded them, and services without a job folder do."""
    original, copy, elsewhere = tmp_path / "old", tmp_path / "new", tmp_path / "shared" / RUN
    async with instance(nats_url) as run:
        await run.versions.publish(base_manifest())
        await publish(run, original, 1, 2)
        await run.versions.publish(make_manifest(elsewhere, 3))
        assert await folder(run, 2) == original / "weights" / "v2"
    shutil.copytree(original / "weights" / "v2", copy / "weights" / "v2")
    async with instance(nats_url, job_folder=copy) as run:
        assert await folder(run, 1) == original / "weights" / "v1", "the copy has none"
        assert await folder(run, 2) == copy / "weights" / "v2"
        assert await folder(run, 3) == elsewhere / "v3", "a folder of synchronizer.storage is no part of the job"
        shutil.rmtree(original)
    async with instance(nats_url, job_folder=copy) as run:
        with pytest.raises(Conflict, match=f"files of 1 are gone from {copy}/weights/v1"):
            await run.versions.roll_back(1, keep_experience=False, reason="")
        assert run.versions.all()[0].state is VersionState.LIVE
