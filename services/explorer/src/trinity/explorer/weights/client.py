"""The explorer's connection to the sync service: join, watch, report. It reconnects until the explorer leaves."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc.aio
import structlog

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.explorer.weights.view import View
from trinity.runtime import rpc
from trinity.runtime.errors import AlreadyExists, Unavailable
from trinity.weights import VersionState

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 0.5
_CALL_SECONDS = 10.0
# A restarted explorer finds its own old lease. A lease older than this belongs to another explorer.
_FOREIGN_LEASE_SECONDS = 40.0


@dataclass(frozen=True)
class Membership:
    """How this explorer registers. `transports` as in sync.v1.Capabilities."""

    run: str
    explorer_id: str
    address: str
    base_model: str
    dtype: str
    tensor_parallel_size: int
    engines: int
    transports: tuple[str, ...] = ("folder",)


class SyncLink:
    """`on_view` gets every watched state, `make_report` fills reports, `reported` gets each report that arrived."""

    def __init__(
        self,
        address: str,
        membership: Membership,
        on_view: Callable[[View], Awaitable[None]],
        make_report: Callable[[], pb.ReportRequest],
        reported: Callable[[pb.ReportRequest], None],
    ) -> None:
        self._channel = rpc.channel(address)
        self._stub = sync_pb2_grpc.SyncServiceStub(self._channel)
        self._membership = membership
        self._on_view = on_view
        self._make_report = make_report
        self._reported = reported
        self._due = asyncio.Event()
        self._lease = ""
        self._left = False

    def report_soon(self) -> None:
        """There is something new to report."""
        self._due.set()

    async def run(self) -> None:
        """Join, then watch and report until the lease is lost. Repeats until `leave`."""
        while not self._left:
            try:
                lease_seconds = await self._join()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watch())
                    group.create_task(self._report(lease_seconds))
            except* (grpc.aio.AioRpcError, grpc.aio.UsageError, Unavailable) as errors:
                first = errors.exceptions[0]
                if isinstance(first, grpc.aio.UsageError) and not self._left:
                    raise
                reason = first.code().name if isinstance(first, grpc.aio.AioRpcError) else str(first)
                log.info("explorer.sync.left" if self._left else "explorer.sync.lost", reason=reason)
            await asyncio.sleep(_RETRY_SECONDS)
        await asyncio.Event().wait()

    async def leave(self) -> None:
        """Leave the run and do not join again. Idempotent."""
        if self._left:
            return
        self._left = True
        if self._lease:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._stub.Leave(pb.LeaveRequest(run=self._membership.run, lease_id=self._lease), timeout=2)
        await self._channel.close()

    async def state_of(self, version: int) -> VersionState | None:
        """A version's state; None if the service does not say."""
        request = pb.GetVersionRequest(run=self._membership.run, version=version)
        try:
            response = await self._stub.GetVersion(request, timeout=_CALL_SECONDS)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            log.info("explorer.sync.silent", version=version, reason=str(error))
            return None
        return VersionState(response.version.state)

    async def _join(self) -> float:
        me = self._membership
        request = pb.JoinRequest(
            run=me.run,
            explorer_id=me.explorer_id,
            capabilities=pb.Capabilities(
                transports=me.transports,
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
                if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                    raise
                if waited > _FOREIGN_LEASE_SECONDS:
                    raise AlreadyExists(str(error.details())) from None
            await asyncio.sleep(1.0)
            waited += 1.0
        self._lease = response.lease_id
        log.info("explorer.sync.joined", lease_seconds=response.lease_seconds)
        return float(response.lease_seconds)

    async def _watch(self) -> None:
        request = pb.WatchRequest(run=self._membership.run, lease_id=self._lease)
        async for response in self._stub.Watch(request):
            await self._on_view(View.from_proto(response))
        raise Unavailable("the watch has ended")

    async def _report(self, lease_seconds: float) -> None:
        while True:
            self._due.clear()
            request = self._make_report()
            request.run, request.lease_id = self._membership.run, self._lease
            await self._stub.Report(request, timeout=_CALL_SECONDS)
            self._reported(request)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lease_seconds / 5):
                    await self._due.wait()
