"""A WeightFollower on real files, with engines that load at once and a sync service whose answers a test writes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from safetensors.numpy import save_file

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.explorer.types import EngineFailed
from trinity.explorer.weights.choice import ExactGates
from trinity.explorer.weights.follower import WeightFollower
from trinity.explorer.weights.load_history import LoadHistory, Verdict
from trinity.explorer.weights.member import Activity
from trinity.runtime.process import free_port
from trinity.weights.client import Membership
from trinity.weights.manifest import Canary, Manifest, Measured, Probe, manifest_of_folder
from trinity.weights.pointer import Epoch
from trinity.weights.stores.cache import WeightCache
from trinity.weights.wire import ExplorerState, VersionState, manifest_to_proto

CANARY = Canary((Probe((1, 2, 3), (-1.0, -2.0)),), 0.1, 1.0)
RIGHT, WRONG = Measured(0.0, 0.01, -1.0, -1.01), Measured(2.0, 3.0, -1.0, -4.0)


class ScriptedSync(sync_pb2_grpc.SyncServiceServicer):
    """Returns the answers that a test sets, and keeps the reports."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.shown = pb.WatchResponse()
        self.reports: list[pb.ReportRequest] = []
        self.joins: list[pb.JoinRequest] = []
        self.states: dict[int, VersionState] = {}
        self.manifests: dict[int, Manifest] = {}
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server()
        sync_pb2_grpc.add_SyncServiceServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    async def show(self, live: Manifest | None = None, candidate: Manifest | None = None, **more: Any) -> None:
        async with self._changed:
            self.shown = pb.WatchResponse(
                live=manifest_to_proto(live) if live else None,
                candidate=manifest_to_proto(candidate) if candidate else None,
                **{"gate_step": live.step if live else -1, **more},
            )
            self._changed.notify_all()

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:
        self.joins.append(request)
        return pb.JoinResponse(lease_id="lease", lease_seconds=1.0)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        while True:
            shown = self.shown
            yield shown
            async with self._changed:
                await self._changed.wait_for(lambda: self.shown is not shown)  # noqa: B023

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportResponse:
        self.reports.append(request)
        return pb.ReportResponse(lease_seconds=1.0)

    async def GetVersion(self, request: pb.GetVersionRequest, context: Any) -> pb.GetVersionResponse:
        if request.version not in self.states:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such version")
        state, manifest = self.states[request.version].wire_name, self.manifests.get(request.version)
        known = manifest_to_proto(manifest) if manifest else None
        return pb.GetVersionResponse(version=pb.WeightVersion(state=state, manifest=known))

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        return pb.LeaveResponse()

    def measured(self, version: int) -> list[float]:
        """max_error of every canary that was reported of a version."""
        return [c.max_error for report in self.reports for c in report.canaries if c.version == version]


class FakeEngines:
    """Loads at once. `fails` and `measures` say what goes wrong, by version, in order."""

    def __init__(self) -> None:
        self.loads = LoadHistory()
        self.loaded: list[tuple[int, dict[str, Any]]] = []
        self.fails: dict[int, int] = {}
        self.measures: dict[int, list[Measured]] = {}
        self.holds = 0
        self.measured = 0
        self.slow: asyncio.Event | None = None

    @property
    def versions(self) -> list[int]:
        return [version for version, _ in self.loaded]

    async def load(self, version: int, update_info: dict[str, Any]) -> tuple[int, float]:
        serial = self.loads.begin(version)
        self.loaded.append((version, update_info))
        if self.fails.get(version, 0) > 0:
            self.fails[version] -= 1
            self.loads.mark_bad(serial, "could not be loaded: boom")
            raise EngineFailed("boom")
        self.holds = version
        return serial, 0.25

    async def measure(self, canary: Canary) -> Measured:
        self.measured += 1
        if self.slow is not None:
            await self.slow.wait()
        planned = self.measures.get(self.holds, [])
        return planned.pop(0) if planned else RIGHT


class FakeGroup:
    """A collective group: its results by version, and the requests to it."""

    def __init__(self, gives: dict[int, dict[str, Any]]) -> None:
        self.gives = gives
        self.asked: list[tuple[int, bool]] = []
        self.epochs: list[int] = []

    def epoch(self, epoch: Epoch | None) -> None:
        number = epoch.number if epoch is not None else 0
        if self.epochs[-1:] != [number]:
            self.epochs.append(number)

    async def ready(self, manifest: Manifest) -> dict[str, Any] | None:
        self.asked.append((manifest.version, True))
        return self.gives.get(manifest.version)

    def decline(self, manifest: Manifest) -> None:
        self.asked.append((manifest.version, False))

    async def close(self) -> None:
        self.epochs.append(-1)


class Explorer:
    """The follower between a service and fake engines, on real files. Without `address` the service is scripted."""

    def __init__(
        self, folder: Path, group: FakeGroup | None = None, *, address: str = "", name: str = "explorer",
        exact: ExactGates | None = None, platform: str = "",
    ) -> None:  # fmt: skip
        self.sync = ScriptedSync()
        self.scripted = not address
        self.engines = FakeEngines()
        self.evaluating = False
        self.folder = folder
        self.base = folder / f"base-{name}"
        self.files(self.base, 0)
        transports = ("folder", "collective-gloo") if group else ("folder",)
        me = Membership("run", name, "127.0.0.1:1", str(self.base), "float32", 1, 1, transports, platform)
        activity = Activity(lambda: ExplorerState.RUNNING, lambda: 1.5, lambda: 7, lambda: self.evaluating)
        self.cache = WeightCache(folder / f"cache-{name}", "run", ["folder"], "")
        gates = exact or ExactGates(enforced=False)
        where = address or self.sync.address
        self.follower = WeightFollower(where, me, self.engines, self.cache, activity, gates, group)
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self.scripted:
            await self.sync.start()
        self.running = asyncio.create_task(self.follower.run())

    async def stop(self) -> None:
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
        await self.follower.leave()
        if self.scripted:
            await self.sync.stop()

    def files(self, folder: Path, version: int) -> None:
        folder.mkdir(parents=True)
        save_file({"weight": np.full((4, 4), version, np.float32)}, folder / "model.safetensors")

    def version(self, version: int, **changes: Any) -> Manifest:
        """A version with a canary, its files in a folder; 0 is the base model."""
        if version == 0:
            return Manifest("run", 0, 0, (), (), (), 1.0, "base", canary=CANARY)
        folder = self.folder / f"v{version}"
        if not folder.exists():
            self.files(folder, version)
        return replace(manifest_of_folder("run", version, folder), **{"canary": CANARY, **changes})

    async def until(self, condition: Callable[[], bool], seconds: float = 10) -> None:
        assert self.running is not None
        async with asyncio.timeout(seconds):
            while not condition():
                if self.running.done():
                    self.running.result()
                await asyncio.sleep(0.01)

    async def serves(self, version: int) -> None:
        """Until a load of the version is good and reported."""
        await self.until(lambda: self.follower.version == version and self.verdict is Verdict.GOOD)
        await self.until(lambda: bool(self.sync.reports) and self.sync.reports[-1].version == version)

    @property
    def verdict(self) -> Verdict:
        return self.engines.loads.verdict(self.engines.loads.newest)

    async def meets(self, step: int) -> bool:
        try:
            await asyncio.wait_for(self.follower.gates.wait_for_step(step), 0.3)
        except TimeoutError:
            return False
        return True

    async def failure(self) -> BaseException:
        """The exception that ends the follower."""
        assert self.running is not None
        await asyncio.wait([self.running], timeout=10)
        error: BaseException | None = self.running.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert error is not None
        return error
