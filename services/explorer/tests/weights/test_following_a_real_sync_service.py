"""A version's life between the real sync service and explorers: verified, rejected with both numbers, rolled back."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from support.fakes.explorers.follower import WRONG, Explorer
from support.programs.forked_run import ForkedService
from support.servers.nats import NatsServer
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.data.experience import VersionSpan
from trinity.explorer.weights import follower
from trinity.explorer.weights.follower import WeightsWrong
from trinity.explorer.weights.load_history import WeightsWithdrawn
from trinity.explorer.weights.member import CannotJoin
from trinity.runtime import rpc
from trinity.runtime.errors import Unavailable
from trinity.weights.manifest import Manifest
from trinity.weights.wire import VersionState, manifest_to_proto

pytestmark = pytest.mark.core


@dataclass
class Run:
    """Two explorers and a trainer's stub."""

    explorers: list[Explorer]
    stub: sync_pb2_grpc.SyncServiceStub

    async def publish(self, version: int) -> Manifest:
        manifest = self.explorers[0].version(version)
        await self.stub.Publish(pb.PublishRequest(manifest=manifest_to_proto(manifest)), timeout=20)
        return manifest

    async def until_all_serve(self, version: int) -> None:
        for explorer in self.explorers:
            await explorer.until(lambda: explorer.follower.version == version, 20)  # noqa: B023
            await asyncio.wait_for(explorer.follower.gates.wait_for_step(version), 20)

    async def state(self, version: int) -> tuple[VersionState, str, pb.CanaryReport]:
        request = pb.GetVersionRequest(run="run", version=version)
        found = (await self.stub.GetVersion(request, timeout=20)).version
        return VersionState(found.state), found.reason, found.measured


@pytest_asyncio.fixture
async def run(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Run]:
    sync = ForkedService("sync", tmp_path, NATS_URL=nats_server.url).start()
    explorers = [Explorer(tmp_path, address=sync.address, name=name) for name in ("a", "b")]
    try:
        async with rpc.channel(sync.address) as channel:
            for explorer in explorers:
                await explorer.start()
            yield Run(explorers, sync_pb2_grpc.SyncServiceStub(channel))
            for explorer in explorers:
                await explorer.stop()
    finally:
        sync.kill()


async def test_versions_are_judged_by_one_explorer_and_served_by_all(run: Run) -> None:
    for version in (0, 1, 2):
        await run.publish(version)
        await run.until_all_serve(version)
        state, _, measured = await run.state(version)
        assert (state, measured.max_error) == (VersionState.LIVE, pytest.approx(0.01))
    for explorer in run.explorers:
        assert explorer.engines.versions == [1, 2]
        assert explorer.engines.measured == 3, "an explorer did not compute the canary"


async def test_a_wrong_version_is_rejected_with_both_numbers_and_served_by_none(run: Run) -> None:
    for explorer in run.explorers:
        explorer.engines.measures[2] = [WRONG] * 2
    await run.publish(0)
    await run.publish(1)
    await run.until_all_serve(1)
    await run.publish(2)
    async with asyncio.timeout(20):
        while (await run.state(2))[0] is not VersionState.REJECTED:
            await asyncio.sleep(0.05)
    _, reason, measured = await run.state(2)
    assert "expected a log-probability of -1, explorer" in reason
    assert reason.count("computed -4") == 2, "two explorers were asked"
    assert measured.max_error == pytest.approx(3.0)
    await run.until_all_serve(1)
    for explorer in run.explorers:
        await explorer.until(lambda explorer=explorer: explorer.engines.versions == [1, 2, 1])
        with pytest.raises(WeightsWithdrawn):
            await explorer.engines.loads.settle([VersionSpan(2, 0, 1)])
    await run.publish(3)
    await run.until_all_serve(3)


async def test_an_explorer_whose_engine_is_wrong_ends_and_the_others_go_on(run: Run) -> None:
    await run.publish(0)
    await run.publish(1)
    await run.until_all_serve(1)
    _, _, measured = await run.state(1)
    wrong, right = run.explorers if measured.explorer_id == "a" else run.explorers[::-1]  # it is asked first again
    wrong.engines.measures[2] = [WRONG] * 3
    await run.publish(2)
    assert isinstance(await wrong.failure(), WeightsWrong)
    assert (await run.state(2))[0] is VersionState.LIVE
    assert right.follower.version == 2


async def test_a_rollback_reaches_every_explorer_and_every_gate_opens(run: Run) -> None:
    for version in (0, 1, 2):
        await run.publish(version)
        await run.until_all_serve(version)
    for target in (1, 0):
        await run.stub.Rollback(pb.RollbackRequest(run="run", version=target, reason="worse"), timeout=20)
        for explorer in run.explorers:
            await explorer.until(lambda: explorer.follower.version == target, 20)  # noqa: B023
            await asyncio.wait_for(explorer.follower.gates.wait_for_step(2), 20)
            assert explorer.engines.versions[-1] == target
    await run.publish(3)
    await run.until_all_serve(3)


async def test_an_outage_of_the_storage_rejects_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_RETRY_SECONDS", 0.2)
    for version in (0, 1):
        await run.publish(version)
        await run.until_all_serve(version)
    tries = 0

    def no_answer(manifest: Manifest) -> None:
        nonlocal tries
        tries += 1
        raise Unavailable("s3: no answer")

    with monkeypatch.context() as outage:
        for explorer in run.explorers:
            outage.setattr(explorer.cache, "fetch", no_answer)
            outage.setattr(explorer.cache, "in_place", lambda _: None)
        await run.publish(2)
        await run.explorers[0].until(lambda: tries >= 6, 60)
        assert (await run.state(2))[0] is VersionState.STAGED
    await run.until_all_serve(2)
    assert (await run.state(2))[0] is VersionState.LIVE


async def test_an_explorer_of_another_platform_ends_with_both(tmp_path: Path, nats_server: NatsServer) -> None:
    sync = ForkedService("sync", tmp_path, NATS_URL=nats_server.url).start()
    on = {"gpu": "1 x NVIDIA H200, torch 2.13.0", "cpu": "cpu with AVX512, 2 cores, torch 2.13.0"}
    first, other = (Explorer(tmp_path, address=sync.address, name=name, platform=on[name]) for name in on)
    try:
        await first.start()
        async with rpc.channel(sync.address) as channel:
            manifest = pb.PublishRequest(manifest=manifest_to_proto(first.version(0)))
            await sync_pb2_grpc.SyncServiceStub(channel).Publish(manifest, timeout=20)
        await first.until(lambda: first.follower.version == 0, 20)
        await other.start()
        refused = await other.failure()
        assert isinstance(refused, CannotJoin) and refused.for_good
        assert str(refused).startswith(f"capabilities.platform: is {on['cpu']}; the run is reproducible")
        assert f"gpu samples on {on['gpu']}" in str(refused)
    finally:
        for explorer in (first, other):
            await explorer.stop()
        sync.kill()
