"""What two instances tell explorers to serve, held against the order in which KV was written."""

import asyncio
import random
from pathlib import Path

import pytest

from support.servers.sync_instances import base_manifest, make_manifest, served
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1.sync_pb2_grpc import SyncServiceStub
from trinity.runtime.broker import Bucket, connect
from trinity.runtime.names import VERSIONS_BUCKET, RunNames
from trinity.sync.store.records import Record, decode
from trinity.weights.manifest import Manifest
from trinity.weights.pointer import decode_live
from trinity.weights.wire import ExplorerState, VersionState, manifest_to_proto

pytestmark = pytest.mark.core

RUN, VERSIONS, EXPLORERS = "served", 30, 3


def is_right(version: int) -> bool:
    return version % 3 != 0


class Observer:
    """Every change of the run's keys, in KV's own order: what was LIVE, and whether it was VERIFIED by then."""

    def __init__(self) -> None:
        self.verified: set[int] = set()
        self.live: list[int] = []
        self.violations: list[str] = []

    async def follow(self, bucket: Bucket) -> None:
        names = RunNames(RUN)
        async for changes in bucket.follow(RUN):
            for change in changes.changes:
                if change.key == names.live_key:
                    self._note(decode_live(change.value or b"").version)
                elif change.key.startswith(f"{RUN}.version."):
                    record = decode(Record, change.value or b"")
                    if record.state is VersionState.VERIFIED:
                        self.verified.add(record.version)

    def _note(self, version: int) -> None:
        if version >= 0 and version not in self.verified:
            self.violations.append(f"version {version} was LIVE before it was VERIFIED")
        self.live.append(version)


async def explore(stubs: list[SyncServiceStub], name: str, told: list[pb.WatchResponse]) -> None:
    """Follows one instance and reports to any; computes canaries as `is_right` says, a little late."""
    able = pb.Capabilities(transports=["folder"], engines=1, tensor_parallel_size=1)
    join = pb.JoinRequest(run=RUN, explorer_id=name, capabilities=able, pid=1, host="h")
    choice = random.Random(name)
    lease = (await stubs[0].Join(join, timeout=20)).lease_id
    async for response in choice.choice(stubs).Watch(pb.WatchRequest(run=RUN, lease_id=lease)):
        told.append(response)
        if not response.HasField("candidate"):
            continue
        version = response.candidate.version
        error = 0.0 if is_right(version) else 5.0
        await asyncio.sleep(choice.random() * 0.02)
        canary = pb.CanaryReport(version=version, mean_error=error, max_error=error, expected=-1, computed=-1 + error)
        report = pb.ReportRequest(run=RUN, lease_id=lease, version=0, state=ExplorerState.RUNNING, canaries=[canary])
        await choice.choice(stubs).Report(report, timeout=20)


async def publish(stub: SyncServiceStub, manifest: Manifest) -> None:
    await stub.Publish(pb.PublishRequest(manifest=manifest_to_proto(manifest)), timeout=20)


@pytest.mark.timeout(120)
async def test_no_explorer_is_told_to_serve_a_version_before_it_was_verified(nats_url: str, tmp_path: Path) -> None:
    told: list[pb.WatchResponse] = []
    observer = Observer()
    async with served(nats_url) as one, served(nats_url) as two, await connect(nats_url, "look") as broker:
        stubs = [one, two]
        bucket = await Bucket.open(broker, VERSIONS_BUCKET)
        work = [asyncio.create_task(observer.follow(bucket))]
        work += [asyncio.create_task(explore(stubs, f"explorer-{index}", told)) for index in range(EXPLORERS)]
        await publish(one, base_manifest(RUN))
        for version in range(1, VERSIONS + 1):
            await publish(stubs[version % 2], make_manifest(tmp_path, version, canary=True, run=RUN))
            await asyncio.sleep(random.Random(version).random() * 0.05)
        newest_right = max(version for version in range(VERSIONS + 1) if is_right(version))
        async with asyncio.timeout(60):
            while not observer.live or observer.live[-1] != newest_right:
                assert all(not task.done() for task in work), [task for task in work if task.done()]
                await asyncio.sleep(0.02)
        for task in work:
            task.cancel()
    assert not observer.violations
    live = {response.live.version for response in told if response.HasField("live")}
    assert live <= set(observer.live)
    assert all(is_right(version) for version in live - {0})
    assert len(live) > 3
    for response in told:
        assert response.gate_step <= max(response.live.step, *response.rejected, 0), "over what is neither"
