"""Instances of the sync service in this process, on a real NATS: what they hold in memory can be looked at."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from safetensors.numpy import save_file

from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.runtime import files, rpc
from trinity.runtime.broker import connect
from trinity.sync.runs import Run, Runs
from trinity.sync.service import open_buckets
from trinity.sync.servicer import SyncServicer
from trinity.sync.settings import SyncSettings
from trinity.sync.store.records import Capabilities, Measured, Member
from trinity.weights.manifest import Canary, Delta, FileInfo, FolderOffer, Manifest, Probe, TensorInfo

RUN = "run"
CANARY = Canary((Probe((1, 2, 3), (-1.0, -2.0)),), mean_tolerance=0.01, max_tolerance=0.1)


def base_manifest(run: str = RUN) -> Manifest:
    return Manifest(run, 0, 0, (), (), (), 1.0, "model")


def make_manifest(folder: Path, version: int, *, base: int = -1, canary: bool = False, run: str = RUN) -> Manifest:
    """A version of four numbers, with its file. `base` >= 0: as a delta to it as well."""
    place = folder / f"v{version}"
    place.mkdir(parents=True, exist_ok=True)
    path = place / "part.safetensors"
    save_file({"w": np.full((2, 2), version, np.float32)}, path)
    info = FileInfo(path.name, path.stat().st_size, files.checksum(path))
    tensors = (TensorInfo("w", "F32", (2, 2), 16, path.name),)
    manifest = Manifest(run, version, version, tensors, (info,), (FolderOffer(str(place)),), 1.0)
    return replace(manifest, canary=CANARY if canary else None, delta=Delta(base, ()) if base >= 0 else None)


def measured(version: int, error: float = 0.0, explorer_id: str = "a") -> Measured:
    """An explorer's result for CANARY, off by `error` everywhere."""
    return Measured(version, error, error, -1.0, -1.0 + error, explorer_id)


def make_member(name: str = "a", pid: int = 1, *transports: str, engines: int = 1) -> Member:
    able = Capabilities(transports or ("folder",), "float32", 1, engines)
    return Member(name, "", pid, "host", "127.0.0.1:1", "model", able)


@contextlib.asynccontextmanager
async def instance(nats_url: str, run: str = RUN, **settings: Any) -> AsyncIterator[Run]:
    """One run as one instance of the service sees it, without gRPC."""
    chosen = SyncSettings(nats_url=nats_url, **settings)
    async with await connect(nats_url, "test") as broker:
        opened = Run(run, await open_buckets(broker, chosen), chosen)
        task = asyncio.create_task(opened.run())
        try:
            async with asyncio.timeout(20):
                await opened.ready()
            yield opened
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@contextlib.asynccontextmanager
async def served(nats_url: str, **settings: Any) -> AsyncIterator[sync_pb2_grpc.SyncServiceStub]:
    """A whole service behind a real gRPC server, in this process."""
    chosen = SyncSettings(nats_url=nats_url, **settings)
    server, servicer = grpc.aio.server(interceptors=[rpc.Edge()], options=rpc.SERVER_OPTIONS), SyncServicer()
    sync_pb2_grpc.add_SyncServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    async with await connect(nats_url, "test") as broker:
        runs = Runs(await open_buckets(broker, chosen), chosen)
        work = asyncio.create_task(runs.work(asyncio.Event()))
        servicer.attach(runs)
        await asyncio.sleep(0)
        await server.start()
        try:
            async with rpc.channel(f"127.0.0.1:{port}") as channel:
                yield sync_pb2_grpc.SyncServiceStub(channel)
        finally:
            await server.stop(grace=0.1)
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait for something that happens by itself."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
