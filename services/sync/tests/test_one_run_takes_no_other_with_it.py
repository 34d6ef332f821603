"""What is wrong with one run's records ends that run's part, and no other's."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.sync_instances import RUN, base_manifest, instance, make_manifest, make_member, served, until
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.runtime.broker import Bucket, connect
from trinity.runtime.errors import DataLoss, InvalidInput
from trinity.runtime.names import MEMBERS_BUCKET, RunNames
from trinity.sync.runs import Run
from trinity.sync.settings import SyncSettings
from trinity.sync.store import records
from trinity.weights import manifest_to_proto

pytestmark = pytest.mark.core


@pytest.fixture
async def run(nats_url: str) -> AsyncIterator[Run]:
    async with instance(nats_url) as opened:
        await opened.staging.stage(base_manifest())
        await opened.versions.commit(0)
        yield opened


@pytest.mark.parametrize("error", [DataLoss("the manifest is gone"), TypeError("an unexpected keyword argument")])
async def test_a_candidate_that_cannot_be_read_does_not_end_the_judging(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    asked = 0

    def unreadable(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        raise error

    await run.members.join(make_member("a"))
    with monkeypatch.context() as broken:
        broken.setattr(records, "decode_candidate", unreadable)
        await run.staging.stage(make_manifest(tmp_path, 1, canary=True))
        await until(lambda: asked > 1)
    await until(lambda: run.state.candidate.version == 1)


async def test_a_run_that_cannot_be_read_is_refused_and_the_others_are_served(nats_url: str) -> None:
    member = pb.JoinRequest(explorer_id="a", pid=1, host="h", capabilities=pb.Capabilities(transports=["folder"]))
    async with await connect(nats_url, "test") as broker, served(nats_url) as stub:
        for name in (RUN, "other"):
            await stub.Stage(pb.StageRequest(manifest=manifest_to_proto(base_manifest(name))), timeout=20)
        member.run = RUN
        lease = (await stub.Join(member, timeout=20)).lease_id
        watch = stub.Watch(pb.WatchRequest(run=RUN, lease_id=lease))
        await watch.read()
        members = await Bucket.open(broker, MEMBERS_BUCKET)
        await members.put_if(f"{RunNames(RUN).members}.b", b'{"capabilities": {}}', 0)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await asyncio.wait_for(watch.read(), 20)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListVersions(pb.ListVersionsRequest(run=RUN), timeout=20)
        for error in (ended, refused):
            assert error.value.code() is grpc.StatusCode.DATA_LOSS
            assert f"run: {RUN} cannot be served" in str(error.value.details())
        listed = await stub.ListVersions(pb.ListVersionsRequest(run="other"), timeout=20)
        assert [version.manifest.version for version in listed.versions] == [0]


async def test_a_manifest_longer_than_nats_takes_is_refused_with_the_setting(run: Run, tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, 1)
    bucket: Any = run.manifests._bucket
    bucket._broker.client._max_payload = 100
    with pytest.raises(
        InvalidInput, match=r"version 1 has \d+ bytes \(1 tensors, 1 files\); NATS takes .* max_payload"
    ):
        await run.staging.stage(manifest)


def test_leases_outlive_no_explorer_that_starts_again() -> None:
    with pytest.raises(ValueError, match=r"lease_seconds\n.*less than or equal to 30"):
        SyncSettings(lease_seconds=60)
