"""Following the sync service: join, load what is LIVE, report; for ever, whatever happens to the service.

A version is fetched and checked before the engines pause; only the load lies inside the pause. While an evaluation runs
here newer versions wait, so that one evaluation measures one version.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import grpc.aio
import structlog

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.explorer.engine.engine import EngineFailed
from trinity.runtime import rpc
from trinity.runtime.errors import AlreadyExists, InvalidInput, TrinityError
from trinity.runtime.metrics import Gauge, Histogram
from trinity.runtime.weights import Manifest, check_files, manifest_from_proto

log = structlog.get_logger(__name__)

VERSION = Gauge("trinity_explorer_weight_version", "Weight version served")
PAUSE = Histogram(
    "trinity_explorer_update_pause_seconds",
    "Pause of the engines for one update, in seconds",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)

_RETRY_SECONDS = 0.5
_CALL_SECONDS = 10.0
_LOAD_ATTEMPTS = 2


class Engines(Protocol):
    """The part of EnginePool that is needed here."""

    async def load(self, version: int, files: list[str], tensors: list[tuple[str, int]]) -> float: ...


@dataclass(frozen=True)
class Membership:
    """What this explorer says of itself."""

    run: str
    explorer_id: str
    address: str
    base_model: str
    dtype: str
    tensor_parallel_size: int
    engines: int


@dataclass
class Activity:
    """What the rest of the explorer says in each report."""

    state: Callable[[], str]
    tokens_per_second: Callable[[], float]
    tokens_generated: Callable[[], int]
    busy_with_evaluation: Callable[[], bool]


class WeightFollower:
    """Keeps the engines at the LIVE version."""

    def __init__(self, address: str, membership: Membership, engines: Engines, activity: Activity) -> None:
        self._channel = rpc.channel(address)
        self._stub = sync_pb2_grpc.SyncServiceStub(self._channel)
        self._membership = membership
        self._engines = engines
        self._activity = activity
        self._lease = ""
        self._wanted: Manifest | None = None
        self._changed = asyncio.Condition()
        self.version = -1
        self.step = -1
        self.updates = 0
        self.last_pause_seconds = 0.0
        self.updating = False
        self._failed: tuple[int, str] = (-1, "")

    async def wait_for_step(self, step: int) -> None:
        """Until the engines serve weights of that optimizer step or newer."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.step >= step)

    async def notify(self) -> None:
        """Something a waiter may wait for has changed."""
        async with self._changed:
            self._changed.notify_all()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._load_what_is_live())
            group.create_task(self._follow())

    async def leave(self) -> None:
        if self._lease:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._stub.Leave(pb.LeaveRequest(run=self._membership.run, lease_id=self._lease), timeout=2)
        await self._channel.close()

    async def _follow(self) -> None:
        """Join, then watch and report until the lease is lost; again and again."""
        while True:
            try:
                lease_seconds = await self._join()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watch())
                    group.create_task(self._report(lease_seconds))
            except* grpc.aio.AioRpcError as errors:
                first = errors.exceptions[0]
                code = first.code().name if isinstance(first, grpc.aio.AioRpcError) else "?"
                log.info("explorer.sync.lost", code=code)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _join(self) -> float:
        me = self._membership
        request = pb.JoinRequest(
            run=me.run,
            explorer_id=me.explorer_id,
            capabilities=pb.Capabilities(
                transports=["folder"],
                dtype=me.dtype,
                tensor_parallel_size=me.tensor_parallel_size,
                engines=me.engines,
            ),
            pid=os.getpid(),
            host=socket.gethostname(),
            address=me.address,
            base_model=me.base_model,
        )
        waited = 0.0
        while True:
            try:
                response = await self._stub.Join(request, timeout=_CALL_SECONDS, wait_for_ready=True)
                break
            except grpc.aio.AioRpcError as error:
                # A restarted explorer meets its own old lease; one that outlives two leases is somebody else's.
                if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                    raise
                if waited > 40:
                    raise AlreadyExists(str(error.details())) from None
            await asyncio.sleep(1.0)
            waited += 1.0
        self._lease = response.lease_id
        log.info("explorer.sync.joined", lease_seconds=response.lease_seconds)
        return float(response.lease_seconds)

    async def _watch(self) -> None:
        request = pb.WatchRequest(run=self._membership.run, lease_id=self._lease)
        async for response in self._stub.Watch(request):
            if not response.HasField("live"):
                continue
            async with self._changed:
                self._wanted = manifest_from_proto(response.live)
                self._changed.notify_all()

    async def _report(self, lease_seconds: float) -> None:
        while True:
            await self._report_once()
            version = self.version
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lease_seconds / 5), self._changed:
                    await self._changed.wait_for(partial(self._differs_from, version))

    async def _report_once(self) -> None:
        failed_version, failure = self._failed
        request = pb.ReportRequest(
            run=self._membership.run,
            lease_id=self._lease,
            version=self.version,
            state=self._activity.state(),
            tokens_per_second=self._activity.tokens_per_second(),
            tokens_generated=self._activity.tokens_generated(),
            last_pause_seconds=self.last_pause_seconds,
            failed_version=failed_version,
            failure=failure,
        )
        await self._stub.Report(request, timeout=_CALL_SECONDS)
        self._failed = (-1, "")

    def _differs_from(self, version: int) -> bool:
        return self.version != version

    def _is_not_wanted(self, manifest: Manifest) -> bool:
        return self._wanted is not manifest

    def _due(self) -> bool:
        wanted = self._wanted
        if wanted is None or wanted.version == self.version:
            return False
        return self.version < 0 or not self._activity.busy_with_evaluation()

    async def _load_what_is_live(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(self._due)
                wanted = self._wanted
            assert wanted is not None
            try:
                await self._load(wanted)
            except InvalidInput as error:
                # Damaged or already collected: a newer version will come, and until then the last good one serves.
                self._failed = (wanted.version, str(error))
                log.warning("explorer.weights.refused", version=wanted.version, reason=str(error))
                async with self._changed:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait_for(partial(self._is_not_wanted, wanted)), 5.0)

    async def _load(self, manifest: Manifest) -> None:
        if manifest.version > 0:
            await self._load_files(manifest)
        elif self.version > 0:
            raise TrinityError("version 0 became LIVE again; its weights are not published, restart this explorer")
        async with self._changed:
            self.version, self.step = manifest.version, manifest.step
            self._changed.notify_all()
        VERSION.set(manifest.version)

    async def _load_files(self, manifest: Manifest) -> None:
        folder = manifest.folder
        if folder is None:
            raise InvalidInput("manifest.offers", "has no transport this explorer can use (folder)")
        await asyncio.to_thread(check_files, manifest, folder)
        files, tensors = manifest.load_arguments(folder)
        self.updating = True
        try:
            for attempt in range(1, _LOAD_ATTEMPTS + 1):
                try:
                    pause = await self._engines.load(manifest.version, files, tensors)
                    break
                except EngineFailed as error:
                    # The engine is paused with part of the weights new; only a whole load makes it good again.
                    log.warning("explorer.weights.load_failed", version=manifest.version, error=str(error))
                    if attempt == _LOAD_ATTEMPTS:
                        raise
        finally:
            self.updating = False
        self.updates += 1
        self.last_pause_seconds = pause
        PAUSE.observe(pause)
        log.info("explorer.weights.loaded", version=manifest.version, step=manifest.step, pause=round(pause, 4))
