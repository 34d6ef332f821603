"""An explorer without an engine, as far as the sync service can tell: it loads at once and computes what it is told."""

import asyncio
import contextlib
import os

import grpc.aio

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.runtime import rpc
from trinity.weights.wire import ExplorerState


class FakeMember:
    """async with FakeMember(...): joined and following. `error`: what its canaries differ by, in nats.

    `follows` False: it stays at what it serves. Set either at any time.
    """

    def __init__(self, address: str, run: str, name: str, error: float = 0.001, follows: bool = True) -> None:
        self._channel = rpc.channel(address)
        self._stub = sync_pb2_grpc.SyncServiceStub(self._channel)
        self._run = run
        self.name = name
        self.error = error
        self.follows = follows
        self.version = -1
        self.served: list[int] = []
        self._lease = ""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "FakeMember":
        able = pb.Capabilities(transports=["folder"], dtype="float32", tensor_parallel_size=1, engines=1)
        request = pb.JoinRequest(
            run=self._run, explorer_id=self.name, capabilities=able, pid=os.getpid(), host="here", address="here:1"
        )
        joined = await self._stub.Join(request, timeout=20)
        self._lease = joined.lease_id
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._keep(joined.lease_seconds / 5))]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub.Leave(pb.LeaveRequest(run=self._run, lease_id=self._lease), timeout=5)
        await self._channel.close()

    async def _watch(self) -> None:
        async for response in self._stub.Watch(pb.WatchRequest(run=self._run, lease_id=self._lease)):
            if response.HasField("candidate"):
                await self._report(self._computed(response.candidate))
            if response.HasField("live") and self.follows and response.live.version != self.version:
                self.version = response.live.version
                self.served.append(self.version)
                await self._report(self._computed(response.live))

    async def _keep(self, seconds: float) -> None:
        """The lease, however slow the machine is."""
        while True:
            await asyncio.sleep(seconds)
            await self._report([])

    def _computed(self, manifest: pb.Manifest) -> list[pb.CanaryReport]:
        if not manifest.HasField("canary"):
            return []
        expected = manifest.canary.probes[0].logprobs[0]
        return [
            pb.CanaryReport(
                version=manifest.version,
                mean_error=self.error / 2,
                max_error=self.error,
                expected=expected,
                computed=expected - self.error,
            )
        ]

    async def _report(self, canaries: list[pb.CanaryReport]) -> None:
        request = pb.ReportRequest(
            run=self._run,
            lease_id=self._lease,
            version=self.version,
            state=ExplorerState.RUNNING,
            tokens_per_second=123.0,
            last_pause_seconds=0.025,
            tokens_generated=4567,
            failed_version=-1,
            canaries=canaries,
            transport="folder" if self.version > 0 else "",
        )
        await self._stub.Report(request, timeout=20)
