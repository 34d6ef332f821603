"""A manifest that is damaged or gone in NATS stops no explorer and no trainer; publishing it again mends it."""

import asyncio
from pathlib import Path

import pytest

from support.servers.sync_instances import RUN, base_manifest, make_manifest, served
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1.sync_pb2_grpc import SyncServiceStub
from trinity.runtime.broker import Bucket, connect
from trinity.runtime.names import MANIFESTS_BUCKET, RunNames
from trinity.sync.store.manifests import digest_of
from trinity.weights.manifest import Manifest
from trinity.weights.wire import encode_manifest, manifest_to_proto

pytestmark = pytest.mark.core


async def publish(stub: SyncServiceStub, manifest: Manifest) -> pb.PublishResponse:
    return await stub.Publish(pb.PublishRequest(manifest=manifest_to_proto(manifest)), timeout=20)


async def watch(stub: SyncServiceStub, name: str, told: list[pb.WatchResponse]) -> None:
    join = pb.JoinRequest(run=RUN, explorer_id=name, pid=1, host="h")
    lease = (await stub.Join(join, timeout=20)).lease_id
    async for response in stub.Watch(pb.WatchRequest(run=RUN, lease_id=lease)):
        told.append(response)


async def until_told(told: list[pb.WatchResponse], live: int, problem: bool) -> pb.WatchResponse:
    async with asyncio.timeout(20):
        while not told or told[-1].live.version != live or bool(told[-1].problem) is not problem:
            await asyncio.sleep(0.02)
    return told[-1]


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
async def test_explorers_hear_the_problem_until_the_version_is_published_again(
    nats_url: str, tmp_path: Path, damage: str
) -> None:
    manifest = make_manifest(tmp_path, 1)
    async with await connect(nats_url, "test") as broker:
        async with served(nats_url) as before:
            await publish(before, base_manifest())
            await publish(before, manifest)
        bucket = await Bucket.open(broker, MANIFESTS_BUCKET)
        key = RunNames(RUN).manifest_key(1, digest_of(encode_manifest(manifest)))
        value = (await bucket.get(key)).value
        if damage == "gone":
            await bucket.delete(key)
        else:
            changed = value[:-3] if damage == "cut" else value.replace(b"part.safetensors", b"part.safetensorx")
            await bucket.update(key, lambda _: changed)
        async with served(nats_url) as stub:
            told: list[pb.WatchResponse] = []
            watching = asyncio.create_task(watch(stub, "a", told))
            response = await until_told(told, 0, problem=True)
            assert "the manifest of version 1 is" in response.problem
            assert (response.HasField("live"), response.gate_step) == (False, 1)
            listed = (await stub.ListVersions(pb.ListVersionsRequest(run=RUN), timeout=20)).versions
            assert [(v.manifest.version, v.state, bool(v.reason)) for v in listed] == [
                (1, pb.VERSION_STATE_LIVE, True), (0, pb.VERSION_STATE_RETIRED, False),
            ]  # fmt: skip
            claim = pb.ClaimRequest(run=RUN, trainer_id="t", pid=1, host="h")
            claimed = await stub.Claim(claim, timeout=20)
            assert claimed.unreadable == 1
            request = pb.PublishRequest(manifest=manifest_to_proto(manifest), lease_id=claimed.lease_id)
            assert (await stub.Publish(request, timeout=20)).state == pb.VERSION_STATE_LIVE
            await until_told(told, 1, problem=False)
            assert not (await stub.Claim(claim, timeout=20)).HasField("unreadable")
            assert not watching.done()
            watching.cancel()


async def test_a_new_version_replaces_one_that_cannot_be_read(nats_url: str, tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, 1)
    async with await connect(nats_url, "test") as broker:
        async with served(nats_url) as before:
            await publish(before, base_manifest())
            await publish(before, manifest)
        bucket = await Bucket.open(broker, MANIFESTS_BUCKET)
        await bucket.update(RunNames(RUN).manifest_key(1, digest_of(encode_manifest(manifest))), lambda _: b"\xff")
        async with served(nats_url) as stub:
            told: list[pb.WatchResponse] = []
            watching = asyncio.create_task(watch(stub, "a", told))
            await until_told(told, 0, problem=True)
            await publish(stub, make_manifest(tmp_path, 2))
            await until_told(told, 2, problem=False)
            watching.cancel()


async def test_a_request_that_only_reads_opens_no_run(nats_url: str) -> None:
    """Names that no trainer and no explorer has used cost no memory and no polls."""
    async with served(nats_url) as stub:
        for number in range(20):
            run = f"stranger-{number}"
            assert not (await stub.ListVersions(pb.ListVersionsRequest(run=run), timeout=20)).versions
            assert not (await stub.ListMembers(pb.ListMembersRequest(run=run), timeout=20)).members
            await stub.Leave(pb.LeaveRequest(run=run, lease_id="x"), timeout=20)
            with pytest.raises(Exception, match="no trainer and no explorer"):
                await stub.GetVersion(pb.GetVersionRequest(run=run, version=1), timeout=20)
        tasks = [task.get_name() for task in asyncio.all_tasks()]
        assert not [name for name in tasks if name.startswith("run stranger")]
        await stub.Join(pb.JoinRequest(run="someone", explorer_id="a", pid=1, host="h"), timeout=20)
        assert "run someone" in [task.get_name() for task in asyncio.all_tasks()]
