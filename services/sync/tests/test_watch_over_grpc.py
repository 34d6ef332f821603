"""What explorers and a trainer see, over real gRPC."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from support.servers.sync_instances import RUN, base_manifest, make_manifest, served
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1.sync_pb2_grpc import SyncServiceStub
from trinity.weights.manifest import CollectiveOffer, Manifest
from trinity.weights.wire import ExplorerState, manifest_to_proto

pytestmark = pytest.mark.core


class Explorer:
    """Joins, watches, and says what it is told to say."""

    def __init__(self, stub: SyncServiceStub, name: str, *transports: str, run: str = RUN) -> None:
        self.stub, self.name, self.run = stub, name, run
        self.transports = transports or ("folder",)
        self.seen: list[pb.WatchResponse] = []
        self.ended: grpc.StatusCode | None = None

    async def join(self) -> "Explorer":
        able = pb.Capabilities(transports=self.transports, engines=1, tensor_parallel_size=1)
        request = pb.JoinRequest(run=self.run, explorer_id=self.name, capabilities=able, pid=1, host="h")
        self.lease = (await self.stub.Join(request, timeout=20)).lease_id
        self.watching = asyncio.create_task(self._watch())
        await self.until(lambda: bool(self.seen))
        return self

    async def _watch(self) -> None:
        try:
            async for response in self.stub.Watch(pb.WatchRequest(run=self.run, lease_id=self.lease)):
                self.seen.append(response)
        except grpc.aio.AioRpcError as error:
            self.ended = error.code()

    async def until(self, condition, seconds: float = 10.0) -> None:  # type: ignore[no-untyped-def]
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)

    @property
    def candidate(self) -> int:
        return self.seen[-1].candidate.version if self.seen[-1].HasField("candidate") else -1

    @property
    def live(self) -> int:
        return self.seen[-1].live.version if self.seen[-1].HasField("live") else -1

    async def report(self, version: int, **fields: object) -> None:
        request = pb.ReportRequest(
            run=self.run, lease_id=self.lease, version=version, state=ExplorerState.WAITING, **fields
        )
        await self.stub.Report(request, timeout=20)

    async def computed(self, version: int, error: float = 0.0) -> None:
        canary = pb.CanaryReport(version=version, mean_error=error, max_error=error, expected=-1, computed=-1 + error)
        await self.report(version, canaries=[canary])


async def publish(stub: SyncServiceStub, manifest: Manifest, lease_id: str = "", keep: int = 0) -> pb.PublishResponse:
    request = pb.PublishRequest(manifest=manifest_to_proto(manifest), lease_id=lease_id, versions_to_keep=keep)
    return await stub.Publish(request, timeout=20)


async def test_a_version_reaches_one_explorer_first_and_then_all(nats_url: str, tmp_path: Path) -> None:
    async with served(nats_url) as stub:
        explorers = [await Explorer(stub, name).join() for name in "abc"]
        assert explorers[0].live == -1
        await publish(stub, base_manifest())
        for explorer in explorers:
            await explorer.until(lambda e=explorer: e.live == 0)
        answer = await publish(stub, make_manifest(tmp_path, 1, canary=True))
        assert answer.state == pb.VERSION_STATE_STAGED
        await explorers[0].until(lambda: explorers[0].candidate == 1)
        assert explorers[0].seen[-1].candidate.canary.max_tolerance == pytest.approx(0.1)
        assert [explorer.candidate for explorer in explorers[1:]] == [-1, -1]
        await explorers[0].computed(1)
        for explorer in explorers:
            await explorer.until(lambda e=explorer: e.live == 1)
            assert (explorer.candidate, explorer.seen[-1].gate_step) == (-1, 1)
            await explorer.report(1, transport="folder", last_pause_seconds=0.5)
        members = (await stub.ListMembers(pb.ListMembersRequest(run=RUN), timeout=20)).members
        assert [(m.explorer_id, m.version, m.lag, m.transport) for m in members] == [
            (name, 1, 0, "folder") for name in "abc"
        ]
        version = (await stub.GetVersion(pb.GetVersionRequest(run=RUN, version=1), timeout=20)).version
        assert (version.holders, version.measured.explorer_id) == (3, "a")


@pytest.mark.parametrize(
    ("mean", "largest", "expected"),
    [(0.5, 1e30, 2.0), (math.nan, 1e308, -1.0), (-1.0, 4.0, -1.0), (2.0, 1.0, -1.0), (1e300, math.inf, -1.0),
     (math.nan, math.nan, -1.0), (math.nan, math.inf, math.nan), (3.0, 4.0, -math.inf)],
)  # fmt: skip
async def test_a_verdict_that_no_comparison_gives_rejects_no_version(
    nats_url: str, tmp_path: Path, mean: float, largest: float, expected: float
) -> None:
    async with served(nats_url) as stub:
        explorer = await Explorer(stub, "a").join()
        await publish(stub, base_manifest())
        await publish(stub, make_manifest(tmp_path, 1, canary=True))
        await explorer.until(lambda: explorer.candidate == 1)
        canary = pb.CanaryReport(version=1, mean_error=mean, max_error=largest, expected=expected, computed=math.nan)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await explorer.report(1, canaries=[canary])
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "canaries" in str(refused.value.details())
        await explorer.computed(1)
        await explorer.until(lambda: explorer.live == 1)


async def test_values_that_are_not_finite_reject_a_version(nats_url: str, tmp_path: Path) -> None:
    async with served(nats_url) as stub:
        explorer = await Explorer(stub, "a").join()
        await publish(stub, base_manifest())
        await publish(stub, make_manifest(tmp_path, 1, canary=True))
        await explorer.until(lambda: explorer.candidate == 1)
        found = pb.CanaryReport(version=1, mean_error=math.nan, max_error=math.inf, expected=-1.0, computed=math.nan)
        await explorer.report(1, canaries=[found])
        await explorer.until(lambda: list(explorer.seen[-1].rejected) == [1])


async def test_a_rejected_version_is_named_and_its_step_met(nats_url: str, tmp_path: Path) -> None:
    async with served(nats_url) as stub:
        explorer = await Explorer(stub, "a").join()
        await publish(stub, base_manifest())
        await publish(stub, make_manifest(tmp_path, 1, canary=True))
        await explorer.until(lambda: explorer.candidate == 1)
        await explorer.computed(1, 4.0)
        await explorer.until(lambda: explorer.seen[-1].gate_step == 1)
        last = explorer.seen[-1]
        assert (last.live.version, list(last.rejected), last.HasField("candidate")) == (0, [1], False)
        members = (await stub.ListMembers(pb.ListMembersRequest(run=RUN), timeout=20)).members
        assert members[0].canary_max_error == pytest.approx(4.0)


async def test_a_second_chance_can_be_told_from_the_first(nats_url: str, tmp_path: Path) -> None:
    async with served(nats_url) as stub:
        explorer = await Explorer(stub, "a").join()
        await publish(stub, make_manifest(tmp_path, 1, canary=True))
        await explorer.until(lambda: explorer.candidate == 1)
        before = len(explorer.seen)
        await explorer.report(-1, failed_version=1, failure="part.safetensors: is missing")
        await explorer.until(lambda: len(explorer.seen) > before + 1 and explorer.candidate == 1)
        assert not explorer.seen[before].HasField("candidate")
        members = (await stub.ListMembers(pb.ListMembersRequest(run=RUN), timeout=20)).members
        assert members[0].failure == "version 1: part.safetensors: is missing"


async def test_a_group_hears_of_its_epoch_and_of_what_is_sent_to_it(nats_url: str, tmp_path: Path) -> None:
    async with served(nats_url) as stub:
        claim = await stub.Claim(pb.ClaimRequest(run=RUN, trainer_id="t", pid=1, host="h"), timeout=20)
        await publish(stub, base_manifest(), claim.lease_id)
        group = [await Explorer(stub, name, "folder", "collective-gloo").join() for name in "ab"]
        alone = await Explorer(stub, "c").join()
        for explorer in (*group, alone):
            await explorer.report(0)
        form = pb.FormEpochRequest(run=RUN, lease_id=claim.lease_id, backend="gloo", store_address="127.0.0.1:1")
        epoch = (await stub.FormEpoch(form, timeout=20)).epoch
        assert (epoch.number, epoch.world_size, [m.explorer_id for m in epoch.members]) == (1, 3, ["a", "b"])
        manifest = make_manifest(tmp_path, 1, canary=True)
        offers = (CollectiveOffer(epoch.number, 1024), *manifest.offers)
        await publish(stub, replace(manifest, offers=offers), claim.lease_id)
        for explorer in group:
            await explorer.until(lambda e=explorer: e.candidate == 1)
            assert explorer.seen[-1].epoch == epoch
        assert alone.candidate == -1 and not alone.seen[-1].HasField("epoch")
        await group[0].computed(1)
        await alone.until(lambda: alone.live == 1)
        form.excluded.append("b")
        form.renew = True
        for explorer in (*group, alone):
            await explorer.report(1)
        assert (await stub.FormEpoch(form, timeout=20)).epoch.number == 2
        await group[1].until(lambda: not group[1].seen[-1].HasField("epoch"))


async def test_a_rollback_reaches_explorers_and_trainer(nats_url: str, tmp_path: Path) -> None:
    async with served(nats_url) as stub:
        claim = await stub.Claim(pb.ClaimRequest(run=RUN, trainer_id="t", pid=1, host="h"), timeout=20)
        assert not claim.HasField("rollback")
        explorer = await Explorer(stub, "a").join()
        for version in (1, 2, 3):
            await publish(stub, make_manifest(tmp_path, version), claim.lease_id)
        back = pb.RollbackRequest(run=RUN, version=1, keep_experience=True, reason="worse")
        done = (await stub.Rollback(back, timeout=20)).rollback
        assert (done.number, done.version, list(done.withdrawn), done.newest_step) == (1, 1, [2, 3], 3)
        await explorer.until(lambda: explorer.live == 1 and explorer.seen[-1].gate_step == 3)
        assert list(explorer.seen[-1].rejected) == [3, 2]
        renewal = pb.ClaimRequest(run=RUN, trainer_id="t", pid=1, host="h", lease_id=claim.lease_id)
        assert (await stub.Claim(renewal, timeout=20)).rollback == done
        request = pb.PublishRequest(manifest=manifest_to_proto(make_manifest(tmp_path, 4)), lease_id=claim.lease_id)
        request.rollback = 0
        with pytest.raises(grpc.aio.AioRpcError, match="do not follow") as refused:
            await stub.Publish(request, timeout=20)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        request.rollback = 1
        await stub.Publish(request, timeout=20)
        await stub.Release(pb.ReleaseRequest(run=RUN, lease_id=claim.lease_id), timeout=20)


async def test_a_stream_ends_with_its_lease(nats_url: str) -> None:
    async with served(nats_url, lease_seconds=1.2) as stub:
        quiet, leaver, returning = [await Explorer(stub, name).join() for name in "abc"]
        await stub.Leave(pb.LeaveRequest(run=RUN, lease_id=leaver.lease), timeout=20)
        again = await Explorer(stub, "c").join()
        for explorer in (quiet, leaver, returning):
            await explorer.until(lambda e=explorer: e.ended is not None)
            assert explorer.ended is grpc.StatusCode.NOT_FOUND
        again.watching.cancel()


async def test_the_trainer_hears_what_it_may_delete(nats_url: str, tmp_path: Path) -> None:
    async with served(nats_url) as stub:
        explorer = await Explorer(stub, "a").join()
        for version in (1, 2):
            await publish(stub, make_manifest(tmp_path, version))
        await explorer.report(1)
        await stub.Pin(pb.PinRequest(run=RUN, version=2, pinned=True), timeout=20)
        assert list((await publish(stub, make_manifest(tmp_path, 3), keep=1)).collectable) == []
        await explorer.report(3)
        assert list((await publish(stub, make_manifest(tmp_path, 4), keep=1)).collectable) == [1]
        listed = (await stub.ListVersions(pb.ListVersionsRequest(run=RUN), timeout=20)).versions
        assert [(v.manifest.version, v.pinned, v.holders) for v in listed] == [
            (4, False, 0), (3, False, 1), (2, True, 0), (1, False, 0),
        ]  # fmt: skip


@pytest.mark.parametrize("run", ["", "a.b", "*", ">", "a b", "x" * 300])
async def test_a_run_that_cannot_be_one_is_refused(nats_url: str, run: str) -> None:
    async with served(nats_url) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListMembers(pb.ListMembersRequest(run=run), timeout=20)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("field", ["host", "address", "base_model", "zone"])
async def test_a_member_says_little_of_itself(nats_url: str, field: str) -> None:
    """64 MiB, the limit of a message, would go into logs, and not into KV."""
    long, named, told = "x" * 70_000, {"run": RUN, "explorer_id": "a", "pid": 1, "host": "h"}, "request: has 7"
    able = pb.Capabilities(zone=long if field == "zone" else "")
    async with served(nats_url) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=told) as refused:
            request = pb.JoinRequest(**{**named, "capabilities": able} | ({} if field == "zone" else {field: long}))
            await stub.Join(request, timeout=20)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        explorer = await Explorer(stub, "a").join()
        with pytest.raises(grpc.aio.AioRpcError, match=told):
            await explorer.report(0, transport=long)
        await explorer.report(0, failed_version=1, failure="f" * 30_000_000)
        (member,) = (await stub.ListMembers(pb.ListMembersRequest(run=RUN), timeout=20)).members
        assert 4096 <= len(member.failure) < 5000
