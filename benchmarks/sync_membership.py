"""A thousand explorers join and leave: time from Commit until they serve the version, and CPU time.

The real sync service on a real nats-server; no engines: a member "loads" a version by reporting it at once. All members
live in a few processes with a few shared channels each.

    python benchmarks/sync_membership.py [--members 1000] [--versions 200] [--tiny]
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import grpc.aio
from buffer_table import Table, percentile

from support.servers.nats import NatsServer
from support.servers.service import ServiceProcess
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.runtime import rpc
from trinity.weights.manifest import manifest_of_folder
from trinity.weights.wire import ExplorerState, manifest_to_proto

RUN = "bench"
_REACHED = 0.99
_CHANNELS = 4
_VERSION_SECONDS = 60.0
_SHOWN = 10


@dataclass(frozen=True)
class Plan:
    members: int
    versions: int
    join_seconds: float
    churn: float
    tensors: int
    processes: int


class Crowd:
    """Members in one process. `served` has, for each version, the monotonic time of the answer to each report."""

    def __init__(self, address: str) -> None:
        own = [*rpc.CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]  # a connection for each channel
        channels = [grpc.aio.insecure_channel(address, own) for _ in range(_CHANNELS)]
        self._stubs = [sync_pb2_grpc.SyncServiceStub(channel) for channel in channels]
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.served: dict[int, list[float]] = defaultdict(list)
        self.lost = 0

    async def join_all(self, names: list[int], seconds: float) -> None:
        async def later(name: int) -> None:
            await asyncio.sleep(random.uniform(0, seconds))
            await self._join(name)

        await asyncio.gather(*map(later, names))

    async def _join(self, name: int) -> None:
        stub = self._stubs[name % _CHANNELS]
        able = pb.Capabilities(transports=["folder"], engines=1, tensor_parallel_size=1)
        request = pb.JoinRequest(run=RUN, explorer_id=f"explorer-{name}", capabilities=able, pid=name, host="h")
        joined = await stub.Join(request, timeout=60)
        self._tasks[name] = asyncio.create_task(self._stay(stub, request, joined))

    async def _stay(
        self, stub: sync_pb2_grpc.SyncServiceStub, request: pb.JoinRequest, joined: pb.JoinResponse
    ) -> None:
        """Join again after a lost lease, like an explorer."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._live(stub, joined)
            self.lost += 1
            await asyncio.sleep(0.5)
            with contextlib.suppress(grpc.aio.AioRpcError):
                joined = await stub.Join(request, timeout=60)

    async def _live(self, stub: sync_pb2_grpc.SyncServiceStub, joined: pb.JoinResponse) -> None:
        report = pb.ReportRequest(run=RUN, lease_id=joined.lease_id, version=-1, state=ExplorerState.RUNNING)
        beat = asyncio.create_task(self._beat(stub, report, joined.lease_seconds / 3))
        try:
            async for response in stub.Watch(pb.WatchRequest(run=RUN, lease_id=joined.lease_id)):
                if response.HasField("live") and response.live.version != report.version:
                    report.version = response.live.version
                    await stub.Report(report, timeout=60)
                    self.served[report.version].append(time.monotonic())
        except asyncio.CancelledError:
            await stub.Leave(pb.LeaveRequest(run=RUN, lease_id=joined.lease_id), timeout=60)
            raise
        finally:
            beat.cancel()

    async def _beat(self, stub: sync_pb2_grpc.SyncServiceStub, report: pb.ReportRequest, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Report(report, timeout=60)

    async def swap(self, part: float) -> None:
        """This share of the members leaves, and as many new members join."""
        gone = random.sample(sorted(self._tasks), round(len(self._tasks) * part))
        for name in gone:
            self._tasks[name].cancel()
        await asyncio.gather(*(self._tasks.pop(name) for name in gone), return_exceptions=True)
        await asyncio.gather(*(self._join(name + 1_000_000) for name in gone))


def crowd_process(address: str, names: list[int], plan: Plan, pipe: Connection) -> None:
    asyncio.run(_crowd(address, names, plan, pipe))


async def _crowd(address: str, names: list[int], plan: Plan, pipe: Connection) -> None:
    crowd = Crowd(address)
    await crowd.join_all(names, plan.join_seconds)
    pipe.send("joined")
    while True:
        what, version = await asyncio.to_thread(pipe.recv)
        if what == "swap":
            await crowd.swap(plan.churn)
            pipe.send("swapped")
        elif what == "served":
            pipe.send(list(crowd.served[version]))
        elif what == "lost":
            pipe.send(crowd.lost)
        else:
            return


class Parts:
    """The crowd's processes."""

    def __init__(self, address: str, plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for index in range(plan.processes):
            here, there = context.Pipe()
            names = list(range(index, plan.members, plan.processes))
            process = context.Process(target=crowd_process, args=(address, names, plan, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    async def ask(self, what: str, version: int = -1) -> list[object]:
        for pipe in self._pipes:
            pipe.send((what, version))
        return await self.answers()

    async def answers(self) -> list[object]:
        return list(await asyncio.gather(*(asyncio.to_thread(pipe.recv) for pipe in self._pipes)))

    async def served(self, version: int) -> list[float]:
        return sorted(at for part in await self.ask("served", version) for at in part)  # type: ignore[attr-defined]

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(("end", -1))
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def write_version(folder: Path, version: int, tensors: int) -> pb.Manifest:
    """A manifest of real size, with files that only have a header."""
    place = folder / f"v{version}"
    place.mkdir(parents=True)
    header = {f"model.layers.{i}.mlp.down_proj.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
              for i in range(tensors)}  # fmt: skip
    text = json.dumps(header).encode()
    (place / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return manifest_to_proto(manifest_of_folder(RUN, version, place))


async def measure(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nats = NatsServer(folder / "nats")
        nats.start()
        sync = ServiceProcess("sync", folder, NATS_URL=nats.url, LOG_LEVEL="WARNING").start()
        parts: Parts | None = None
        try:
            begin = time.monotonic()
            parts = Parts(sync.address, plan)
            await parts.answers()
            joined_seconds = time.monotonic() - begin
            await publish_all(plan, folder, sync, parts, joined_seconds)
        finally:
            if parts is not None:
                parts.end()
            sync.stop()
            nats.stop()


async def publish_all(plan: Plan, folder: Path, sync: ServiceProcess, parts: Parts, joined_seconds: float) -> None:
    process, before = psutil.Process(sync.pid), psutil.Process(sync.pid).cpu_times()
    begin, waits, peak, manifest_bytes = time.monotonic(), [], 0, 0
    async with rpc.channel(sync.address) as channel:
        stub = sync_pb2_grpc.SyncServiceStub(channel)
        for version in range(1, plan.versions + 1):
            await parts.ask("swap")
            manifest = await asyncio.to_thread(write_version, folder, version, plan.tensors)
            manifest_bytes = manifest.ByteSize()
            published = time.monotonic()
            await stub.Publish(pb.PublishRequest(manifest=manifest), timeout=60)
            waits.append(await reached(parts, version, round(plan.members * _REACHED)) - published)
            peak = max(peak, process.memory_info().rss)
            if version % _SHOWN == 0:
                print(f"{version} of {plan.versions} versions, p50 {percentile(waits, 0.5):.3f} s", file=sys.stderr)
        members = (await stub.ListMembers(pb.ListMembersRequest(run=RUN), timeout=60)).members
    after, seconds = process.cpu_times(), time.monotonic() - begin
    cpu = after.user + after.system - before.user - before.system
    lost = sum(await parts.ask("lost"))  # type: ignore[arg-type]
    ends = f"{len(members)}", f"{lost}", f"{joined_seconds:.1f}"
    show(plan, waits, cpu, seconds, peak, manifest_bytes, ends)


async def reached(parts: Parts, version: int, wanted: int) -> float:
    """Time until this many members reported the version."""
    async with asyncio.timeout(_VERSION_SECONDS):
        while len(served := await parts.served(version)) < wanted:
            await asyncio.sleep(0.05)
    return served[wanted - 1]


def show(
    plan: Plan, waits: list[float], cpu: float, seconds: float, peak: int, manifest: int, ends: tuple[str, ...]
) -> None:
    times = ("joined in s", "p50 s", "p99 s")
    used = ("CPU s", "CPU s a version", "CPU part", "RSS MiB")
    table = Table(
        f"Commit until {_REACHED:.0%} of {plan.members} members report it, {plan.versions} versions, "
        f"{plan.churn:.0%} leaving and joining before each",
        ("members", "alive at end", "leases lost", *times, *used),
        [f"service, nats-server and {plan.processes} client processes on one machine; manifest {manifest // 1024} KiB"],
    )
    figures = [*ends, f"{percentile(waits, 0.5):.3f}", f"{percentile(waits, 0.99):.3f}"]
    costs = [f"{cpu:.1f}", f"{cpu / plan.versions:.3f}", f"{cpu / seconds:.0%}", f"{peak / 2**20:.0f}"]
    table.rows.append((str(plan.members), *figures, *costs))
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--join-seconds", type=float, default=30.0, help="members join within this time")
    parser.add_argument("--churn", type=float, default=0.05, help="part that leaves and joins before each version")
    parser.add_argument("--tensors", type=int, default=300, help="tensors in each manifest")
    parser.add_argument("--processes", type=int, default=2, help="client processes")
    parser.add_argument("--tiny", action="store_true", help="40 members, 5 versions: does it run?")
    given = parser.parse_args()
    plan = Plan(given.members, given.versions, given.join_seconds, given.churn, given.tensors, given.processes)
    if given.tiny:
        plan = Plan(40, 5, 1.0, given.churn, 20, 2)
    asyncio.run(measure(plan))


if __name__ == "__main__":
    main()
