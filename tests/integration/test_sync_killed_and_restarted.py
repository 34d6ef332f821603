"""The sync service is killed between Stage and Commit, and while explorers watch: nothing is lost."""

import asyncio
from pathlib import Path

import grpc.aio

from support.nats import NatsServer
from support.service import ServiceProcess
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.runtime import rpc
from trinity.runtime.weights import Manifest, manifest_to_proto


async def test_versions_members_and_watches_come_back(tmp_path: Path, nats_server: NatsServer) -> None:
    sync = ServiceProcess("sync", tmp_path, NATS_URL=nats_server.url).start()
    manifest = manifest_to_proto(Manifest("run", 0, 0, (), (), (), 1.0, "model"))
    try:
        async with rpc.channel(sync.address) as channel:
            stub = sync_pb2_grpc.SyncServiceStub(channel)
            joined = await stub.Join(pb.JoinRequest(run="run", explorer_id="a", pid=1, host="h"), timeout=20)
            await stub.Stage(pb.StageRequest(manifest=manifest), timeout=20)
            sync.kill()
            sync.start()
            await stub.Commit(pb.CommitRequest(run="run", version=0), timeout=20, wait_for_ready=True)
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
    finally:
        sync.kill()
