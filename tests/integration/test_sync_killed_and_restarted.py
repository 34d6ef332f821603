"""The sync service is killed at any moment, in the middle of a Stage, a Commit or a rollback too: nothing is lost."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import grpc.aio
import pytest

from support.programs.forked_run import ForkedService
from support.servers.nats import NatsServer
from support.servers.sync_instances import CANARY, make_manifest
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.runtime import rpc
from trinity.weights.manifest import Manifest
from trinity.weights.wire import manifest_to_proto

pytestmark = pytest.mark.core

T = TypeVar("T")
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


@pytest.fixture
def sync(tmp_path: Path, nats_server: NatsServer) -> Iterator[ForkedService]:
    process = ForkedService("sync", tmp_path, NATS_URL=nats_server.url).start()
    yield process
    process.kill()


async def surely(call: Callable[[], Awaitable[T]], seconds: float = 60.0) -> T:
    """As a client does: again while the service is away."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() not in _AWAY:
                    raise
            await asyncio.sleep(0.02)


async def killed_during(sync: ForkedService, call: Callable[[], Awaitable[T]], after_seconds: float) -> T:
    """The answer to a call whose service was killed so long after it came."""
    answer = asyncio.ensure_future(surely(call))
    await asyncio.sleep(after_seconds)
    sync.kill()
    await asyncio.to_thread(sync.start)
    return await answer


async def test_versions_members_and_watches_come_back(sync: ForkedService) -> None:
    manifest = manifest_to_proto(Manifest("run", 0, 0, (), (), (), 1.0, "model"))
    async with rpc.channel(sync.address) as channel:
        stub = sync_pb2_grpc.SyncServiceStub(channel)
        joined = await stub.Join(pb.JoinRequest(run="run", explorer_id="a", pid=1, host="h"), timeout=20)
        await stub.Publish(pb.PublishRequest(manifest=manifest), timeout=20)
        sync.kill()
        sync.start()
        await stub.Publish(pb.PublishRequest(manifest=manifest), timeout=20, wait_for_ready=True)
        watch = stub.Watch(pb.WatchRequest(run="run", lease_id=joined.lease_id), timeout=60)
        async with asyncio.timeout(20):
            assert (await watch.read()).live.version == 0
        sync.kill()
        assert await asyncio.wait_for(watch.code(), 20) is grpc.StatusCode.UNAVAILABLE
        sync.start()
        request = pb.ReportRequest(run="run", lease_id=joined.lease_id, version=0)
        await stub.Report(request, timeout=20, wait_for_ready=True)
        members = (await stub.ListMembers(pb.ListMembersRequest(run="run"), timeout=20)).members
        assert [(m.explorer_id, m.version, m.lag) for m in members] == [("a", 0, 0)]
    assert sync.stop() == 0


@pytest.mark.slow
async def test_killed_during_publish_and_rollback(sync: ForkedService, tmp_path: Path) -> None:
    chance = random.Random(5)
    async with rpc.channel(sync.address) as channel:
        stub = sync_pb2_grpc.SyncServiceStub(channel)
        for version in range(1, 6):
            made = pb.PublishRequest(manifest=manifest_to_proto(make_manifest(tmp_path, version)), versions_to_keep=10)
            await killed_during(sync, lambda made=made: stub.Publish(made, timeout=5), chance.uniform(0, 0.02))
            assert await states(stub) == {version: "LIVE"} | dict.fromkeys(range(1, version), "RETIRED")
        back = pb.RollbackRequest(run="run", version=2, reason="for the test")
        done = await killed_during(sync, lambda: stub.Rollback(back, timeout=5), 0.004)
        assert (done.rollback.number, list(done.rollback.withdrawn)) == (1, [3, 4, 5])
        assert await states(stub) == {1: "RETIRED", 2: "LIVE", 3: "REJECTED", 4: "REJECTED", 5: "REJECTED"}


async def states(stub: sync_pb2_grpc.SyncServiceStub) -> dict[int, str]:
    listed = await surely(lambda: stub.ListVersions(pb.ListVersionsRequest(run="run"), timeout=5))
    return {v.manifest.version: pb.VersionState.Name(v.state).removeprefix("VERSION_STATE_") for v in listed.versions}


async def test_killed_while_a_canary_is_awaited(sync: ForkedService, tmp_path: Path) -> None:
    manifest = replace(make_manifest(tmp_path, 1), canary=CANARY)
    async with rpc.channel(sync.address) as channel:
        stub = sync_pb2_grpc.SyncServiceStub(channel)
        claim = await stub.Claim(pb.ClaimRequest(run="run", trainer_id="t", pid=1, host="h"), timeout=20)
        joined = await stub.Join(pb.JoinRequest(run="run", explorer_id="a", pid=1, host="h"), timeout=20)
        made = pb.PublishRequest(manifest=manifest_to_proto(manifest), lease_id=claim.lease_id)
        await stub.Publish(made, timeout=20)
        sync.kill()
        sync.start()
        watch = stub.Watch(pb.WatchRequest(run="run", lease_id=joined.lease_id), timeout=60, wait_for_ready=True)
        async with asyncio.timeout(20):
            while (await watch.read()).candidate.version != 1:
                pass
        second = pb.ClaimRequest(run="run", trainer_id="other", pid=2, host="h")
        with pytest.raises(grpc.aio.AioRpcError, match="process 1 on h"):
            await stub.Claim(second, timeout=20)
        canary = pb.CanaryReport(version=1, mean_error=0.0, max_error=0.0)
        report = pb.ReportRequest(run="run", lease_id=joined.lease_id, version=1, canaries=[canary])
        await stub.Report(report, timeout=20)
        assert await states(stub) == {1: "LIVE"}
        watch.cancel()
