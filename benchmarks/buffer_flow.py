"""Throughput and latency of groups from the explorer's `store` to the trainer's StreamBatches."""

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import buffer_peers as peers
import psutil
from buffer_peers import IN_FLIGHT, Work
from buffer_table import Table, at_least, at_most, percentile, until_serving

from support.fakes.data.experience import make_group, make_task
from support.fakes.peers import FakeTrainer
from support.servers.buffer_run import BufferRun
from support.servers.certificates import make_certificates
from support.servers.nats import NatsServer
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import task_pb2
from trinity.data.experience import Experience, Group, Task
from trinity.data.wire import encode_outcome, task_from_proto
from trinity.explorer.rollout import attempt
from trinity.runtime import names
from trinity.runtime.broker import Broker, connect, tail

RATIO, LATENCY_MS, TLS_RATIO = 0.5, 100.0, 0.97
ROLLOUTS = 8
_FEED_SECONDS = 300.0


@dataclass
class Flow:
    """A run whose tasks are all fed. `groups` has the group to publish for each task, in order."""

    run: BufferRun
    trainer: FakeTrainer
    broker: Broker
    groups: list[Group]
    received_at: dict[int, float] = field(default_factory=dict)  # step -> time at which its batch was complete
    ordinals: dict[int, list[int]] = field(default_factory=dict)  # step -> its tasks

    async def store(self, group: Group) -> None:
        await attempt.store(self.broker, names.RunNames(self.run.run), group)

    async def receive(self) -> None:
        """Yields every batch of the run, in order."""
        step, received = 0, 0
        async for part in self.trainer.buffer.StreamBatches(pb.StreamBatchesRequest(run=self.run.run, from_step=1)):
            kind = part.WhichOneof("part")
            received += kind == "group"
            if kind == "entry":
                step = part.entry.step
                self.ordinals[step] = [group.ordinal for group in part.entry.groups]
            elif kind == "end":
                self.received_at[step] = time.perf_counter()
                if step == self.run.steps:
                    break
        assert received == len(self.groups), f"{received} groups came of {len(self.groups)}"


@contextlib.asynccontextmanager
async def flow(work: Work, certificates: Path | None = None) -> AsyncIterator[Flow]:
    """Start buffer and sync, make version 0 LIVE, feed the tasks and read them back, before timing begins.

    With a folder of certificates, over mTLS.
    """
    run = BufferRun(
        work.folder,
        work.server,
        steps=work.count // work.per_step,
        groups=work.per_step,
        settings={"LOG_GIB": "8"},
        certificates=certificates,
        algorithm={"algorithm_type": "grpo", "repeat_times": ROLLOUTS},
        model={"max_response_tokens": work.response},
        synchronizer={"sync_interval": 1_000_000},
    )
    for process in (run.sync, run.buffer):
        process.start(wait_seconds=0)
    await until_serving(run.sync, run.buffer)
    trainer = run.trainer()
    try:
        await trainer.begin()
        async with await connect(work.server.url, "bench") as broker:
            tasks = await _fed_tasks(broker, names.RunNames(run.run), work.count)
            same, now = rollouts(work.response), time.time()
            yield Flow(run, trainer, broker, [Group(task, 1, "bench", same, now, now) for task in tasks])
    finally:
        await trainer.close()
        run.stop()


async def _fed_tasks(broker: Broker, run: names.RunNames, count: int) -> list[Task]:
    """The tasks of the feeder. The buffer refuses groups of other tasks."""
    tasks: list[Task] = []
    async with asyncio.timeout(_FEED_SECONDS):
        async for message in tail(broker, run.tasks_stream, 0):
            tasks.append(task_from_proto(task_pb2.Task.FromString(message.data)))
            if len(tasks) == count:
                break
    return tasks


def rollouts(response: int) -> tuple[Experience, ...]:
    """Groups with the same tokens for every task, which cost no time to make."""
    return make_group(make_task(repeat_times=ROLLOUTS), response=response).experiences


async def _all_of_it(live: Flow) -> float:
    """Seconds from the first `store` to the last batch received, with 64 groups in flight."""
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def store(group: Group) -> None:
        async with gate:
            await live.store(group)

    begin = time.perf_counter()
    receiving = asyncio.create_task(live.receive())
    await asyncio.gather(*(store(group) for group in live.groups))
    await receiving
    return time.perf_counter() - begin


async def as_fast_as_it_goes(work: Work) -> float:
    async with flow(work) as live:
        return await _all_of_it(live)


async def with_processor_time(work: Work, certificates: Path | None) -> tuple[float, float]:
    """Elapsed seconds, and CPU seconds of this process, buffer and nats-server."""
    async with flow(work, certificates) as live:
        processes = [psutil.Process(pid) for pid in (os.getpid(), live.run.buffer.pid, work.server.pid)]
        before = sum(sum(process.cpu_times()[:2]) for process in processes)
        seconds = await _all_of_it(live)
        return seconds, sum(sum(process.cpu_times()[:2]) for process in processes) - before


@dataclass
class Latencies:
    """Milliseconds since the due time of `store`: of the last group for batches, of the group itself for groups."""

    batches: list[float] = field(default_factory=list)
    groups: list[float] = field(default_factory=list)


async def at_a_rate(work: Work, groups_per_second: float, found: Latencies) -> None:
    """Stores `groups_per_second` groups each second, without waiting for earlier groups."""
    async with flow(work) as live:
        receiving = asyncio.create_task(live.receive())
        begin = time.perf_counter() + 0.1
        due_at = {group.task.ordinal: begin + index / groups_per_second for index, group in enumerate(live.groups)}
        storing = []
        for group in live.groups:
            await asyncio.sleep(max(0.0, due_at[group.task.ordinal] - time.perf_counter()))
            storing.append(asyncio.create_task(live.store(group)))
        await asyncio.gather(*storing, receiving)
    for step, received_at in live.received_at.items():
        waited = [1000 * (received_at - due_at[ordinal]) for ordinal in live.ordinals[step]]
        found.batches.append(min(waited))
        found.groups += waited


PATHS: dict[str, Callable[[Work], Awaitable[float]]] = {
    "trinity": as_fast_as_it_goes,
    "nats-py": peers.nats_py,
    "sqlite": peers.sqlite,
    "sqlite, WAL": peers.sqlite_wal,
    "asyncio.Queue": peers.queue,
}


@contextlib.contextmanager
def fresh_work(args: argparse.Namespace, response: int, certificates: Path | None = None) -> Iterator[Work]:
    """One run on a new nats-server, with TLS if certificates are given. Long responses have a quarter of the groups."""
    count = args.groups if response < 1024 else args.groups // 4
    count = max(args.per_step, count - count % args.per_step)
    same = Group(make_task(repeat_times=ROLLOUTS), 1, "bench", rollouts(response), 0.0, 0.0)
    own = certificates / "nats" if certificates is not None else None
    trusted = {"TRINITY_NATS_CA": str(own / "ca.crt")} if own is not None else {}
    with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.dict(os.environ, trusted):
        server = NatsServer(Path(folder) / "nats", certificate=own)
        server.start()
        try:
            yield Work(Path(folder), server, response, encode_outcome(same), count, args.per_step)
        finally:
            server.stop()


async def throughput(args: argparse.Namespace, groups_per_second: dict[int, float]) -> Table:
    """Measures every path in turn on the same server, and fills in Trinity's throughput for each length."""
    table = Table(
        f"throughput: medians of {args.runs} rounds",
        ("group", "path", "groups/s", "MB/s", "of nats-py", "limit"),
        [
            "trinity: from store to the trainer, with every check, the ledger and the batches",
            "nats-py: the same bytes published and fetched on the same server",
            "sqlite: a transaction a put, a take selects and marks in one; asyncio.Queue keeps nothing. For scale",
        ],
    )
    for response in args.responses:
        rounds: list[dict[str, float]] = []
        for index in range(args.runs):
            with fresh_work(args, response) as work:
                order = list(PATHS) if index % 2 == 0 else list(reversed(PATHS))
                rounds.append({name: await PATHS[name](work) for name in order})
        for name in PATHS:
            rate = work.count / statistics.median(seconds[name] for seconds in rounds)
            ratios = sorted(seconds["nats-py"] / seconds[name] for seconds in rounds)
            ratio = statistics.median(ratios)
            figures = f"{rate:,.0f}", f"{rate * len(work.payload) / 1e6:,.0f}", f"{ratio:.2f}"
            limit = at_least(ratio, RATIO) if name == "trinity" else ""
            table.rows.append((f"{ROLLOUTS} x {response}", name, *figures, limit))
            if name == "trinity":
                groups_per_second[response] = rate
                each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
                table.notes.append(f"{ROLLOUTS} x {response}: {len(work.payload):,} bytes a group; ratios {each}")
    return table


async def cost_of_tls(args: argparse.Namespace) -> Table:
    """Throughput with mTLS between services, with TLS to NATS too, and without both, in alternating rounds."""
    table = Table(
        f"mTLS: medians of {args.runs} rounds",
        ("group", "bytes", "with TLS", "groups/s", "ratio", "limit", "CPU ms/group", "ratio", "ratios of the rounds"),
        [
            "from store to the trainer; the log lies on NATS, so StreamBatches is what crosses gRPC",
            "CPU: of this process, which stores and receives, of the buffer and of nats-server",
        ],
    )
    with tempfile.TemporaryDirectory() as name:
        certificates = make_certificates(Path(name) / "identity")
        kinds = {"none": (None, None), "gRPC": (certificates, None), "gRPC and NATS": (certificates, certificates)}
        for response in args.responses:
            rounds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for index in range(args.runs):
                for kind in list(kinds) if index % 2 == 0 else reversed(kinds):
                    of_services, of_nats = kinds[kind]
                    with fresh_work(args, response, of_nats) as work:
                        rounds[kind].append(await with_processor_time(work, of_services))
            size = f"{ROLLOUTS} x {response}", f"{len(work.payload):,}"
            for kind in kinds:
                table.rows.append((*size, kind, *_against(rounds["none"], rounds[kind], work.count, kind == "none")))
    return table


def _against(
    plain: list[tuple[float, float]], secure: list[tuple[float, float]], groups: int, is_plain: bool
) -> tuple[str, ...]:
    seconds, spent = (statistics.median(column) for column in zip(*secure, strict=True))
    rate, each = f"{groups / seconds:,.0f}", f"{1000 * spent / groups:.2f}"
    if is_plain:
        return rate, "", "", each, "", ""
    ratios, of_cpu = ([one[i] / other[i] for one, other in zip(plain, secure, strict=True)] for i in (0, 1))
    ratio = statistics.median(ratios)
    of_rounds = ", ".join(f"{one:.2f}" for one in ratios)
    return rate, f"{ratio:.3f}", at_least(ratio, TLS_RATIO), each, f"{statistics.median(of_cpu):.3f}", of_rounds


async def latency(args: argparse.Namespace, groups_per_second: dict[int, float]) -> Table:
    """Latency at half of the throughput, which is measured here if its part was left out."""
    table = Table(
        f"latency at half that load: all batches of {args.runs} runs",
        (
            "group",
            "groups/s",
            "milliseconds from ... to the whole batch",
            "count",
            "p50",
            "p99",
            "most",
            "limit of p99",
        ),
        [
            "from the moment at which a group was due for store, late or not, until the trainer had its whole batch",
            f"last group: the batch was complete then; any group: it waits for the rest of its {args.per_step} too",
        ],
    )
    for response in args.responses:
        if response not in groups_per_second:
            with fresh_work(args, response) as work:
                groups_per_second[response] = work.count / await as_fast_as_it_goes(work)
        rate, found = groups_per_second[response] / 2, Latencies()
        for _ in range(args.runs):
            with fresh_work(args, response) as work:
                await at_a_rate(work, rate, found)
        for name, values in (("last group", found.batches), ("any group", found.groups)):
            p50, p99, most = percentile(values, 0.5), percentile(values, 0.99), max(values)
            figures = f"{len(values):,}", f"{p50:.1f}", f"{p99:.1f}", f"{most:.1f}"
            limit = at_most(p99, LATENCY_MS) if values is found.batches else ""
            table.rows.append((f"{ROLLOUTS} x {response}", f"{rate:,.0f}", name, *figures, limit))
    return table
