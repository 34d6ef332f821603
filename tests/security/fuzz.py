"""Malformed messages at every RPC and every subject: no crash, no hang, no INTERNAL, no growth over 10 %.

    python tests/security/fuzz.py [--calls 10000] [--messages 2000] [--seed 0] [--services buffer,sync]

Buffer, sync, environment and trainer are processes of their own on a real nats-server; the trainer has a tiny model and
waits for the first batch of a run of its own, whose versions and members are those that the messages at sync name. Of
the explorer the gRPC edge runs here, with a real tokenizer and an engine that always says the same. After the messages
the buffer is started again and has to serve the run's steps. Prints one table; exit code 1 on a violation.
"""

import argparse
import asyncio
import importlib
import logging
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
import grpc.aio
import numpy as np
import psutil
import structlog
from google.protobuf.descriptor import MethodDescriptor
from random_messages import KNOWN, TOKEN, Maker
from rich.console import Console
from rich.table import Table

from support.fakes.peers import explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from support.servers.service import ServiceProcess
from trinity.api.explorer.v1 import explorer_pb2_grpc
from trinity.api.sync.v1 import sync_pb2, sync_pb2_grpc
from trinity.config.schema.model import ModelConfig
from trinity.data.experience import Limits, SamplingParams, VersionSpan
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.rollout.loop import Progress
from trinity.explorer.servicer import ExplorerServicer
from trinity.explorer.sessions.offers import OutsideSessions
from trinity.explorer.sessions.session import Sessions
from trinity.explorer.types import Completion
from trinity.runtime import names, rpc
from trinity.runtime.broker import connect
from trinity.weights.wire import ExplorerState

ROOT = Path(__file__).parents[2]
SERVICES = ("buffer", "sync", "environment", "explorer", "trainer")
BAD_CODES = ("INTERNAL", "UNKNOWN")
OWNER = names.owner_of("tester")
GROWTH, GROWTH_CALLS = 1.10, 1000  # with fewer calls of each method the first ones' imports and pools count as growth
_CALL_SECONDS = 5.0
_SCORE_SECONDS = 45.0  # a scorer may take BUDGET_SECONDS (trinity.sdk.scoring)
_STREAM_SECONDS = 0.3
_AT_ONCE = 32
_CLIENTS_OWN = "Internal error from Core"  # no server says it
_STEPS = 3
_TRAINER_SECONDS = 400.0
# They wait by their contract: for room, for the log, for the end of a step or of running tasks.
_MAY_WAIT = (
    "PublishTasks", "Fence", "Drain", "StreamBatches", "Watch", "Attach", "Episode", "Pause", "Checkpoint",
    "OpenSession",
)  # fmt: skip


@dataclass
class Row:
    """What became of the messages at one place."""

    place: str
    sent: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def methods_of(service: str) -> list[MethodDescriptor]:
    pb: Any = importlib.import_module(f"trinity.api.{service}.v1.{service}_pb2")
    return list(pb.DESCRIPTOR.services_by_name[f"{service.capitalize()}Service"].methods)


def _seconds(method: MethodDescriptor) -> float:
    return _SCORE_SECONDS if method.name == "Score" else _CALL_SECONDS


async def call(channel: grpc.aio.Channel, method: MethodDescriptor, maker: Maker) -> str:
    """The status of one call; "HANGS" for one that should have ended."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    many_in, many_out = method.client_streaming, method.server_streaming
    messages = [maker.data(method.input_type) for _ in range(3 if many_in else 1)]
    seconds = _STREAM_SECONDS if method.name in _MAY_WAIT else _seconds(method)
    try:
        if not many_in and not many_out:
            await channel.unary_unary(path)(messages[0], timeout=seconds)
            return "OK"
        stream: Any = (
            channel.stream_stream(path)(timeout=_CALL_SECONDS)
            if many_in
            else channel.unary_stream(path)(messages[0], timeout=_CALL_SECONDS)
        )
        try:
            async with asyncio.timeout(_STREAM_SECONDS):
                for message in messages if many_in else ():
                    await stream.write(message)
                while await stream.read() is not grpc.aio.EOF:
                    pass
                return str((await stream.code()).name)
        except TimeoutError:
            stream.cancel()
            return "OPEN"
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "WAITS" if method.name in _MAY_WAIT else "HANGS"
        if error.details() == _CLIENTS_OWN:  # the server had ended the stream that was written to
            return "ENDED"
        return error.code().name
    except asyncio.InvalidStateError:  # as above
        return "ENDED"


async def fuzz_method(address: str, method: MethodDescriptor, calls: int, maker: Maker) -> Row:
    row = Row(f"{method.containing_service.name}.{method.name}")
    gate = asyncio.Semaphore(_AT_ONCE)
    async with rpc.channel(address) as channel:

        async def one() -> None:
            async with gate:
                row.codes[await call(channel, method, maker)] += 1
                row.sent += 1

        for begin in range(0, calls, 1000):
            await asyncio.gather(*(one() for _ in range(min(1000, calls - begin))))
    row.problems += [f"{row.codes[code]} {code}" for code in BAD_CODES if row.codes[code]]
    if row.codes["HANGS"]:
        row.problems.append(f"{row.codes['HANGS']} calls did not end in {_seconds(method):g} s")
    if row.codes["UNAVAILABLE"] and method.name not in _MAY_WAIT and row.codes["UNAVAILABLE"] == row.sent:
        row.problems.append("the service does not answer any more")
    return row


async def fuzz_rpcs(
    addresses: dict[str, str],
    processes: dict[str, ServiceProcess],
    calls: int,
    makers: dict[str, Maker],
    services: Sequence[str],
) -> list[Row]:
    rows = []
    for service in services:
        maker = makers[service]
        found = [await fuzz_method(addresses[service], m, max(1, calls // 2), maker) for m in methods_of(service)]
        before = _resident(processes.get(service))  # warm: gRPC and the allocator fill pools in some thousand calls
        for row, method in zip(found, methods_of(service), strict=True):
            again = await fuzz_method(addresses[service], method, calls - row.sent, maker)
            row.sent, row.codes = row.sent + again.sent, row.codes + again.codes
            row.problems += again.problems
        rows += found
        rows.append(_size(service, processes.get(service), before, bounded=calls >= GROWTH_CALLS))
    return [row for row in rows if row.sent or row.problems]


def _resident(process: ServiceProcess | None) -> int:
    return int(psutil.Process(process.pid).memory_info().rss) if process is not None and process.is_running() else 0


def _size(service: str, process: ServiceProcess | None, before: int, *, bounded: bool) -> Row:
    row = Row(f"{service}: memory")
    if process is None:
        return row
    if not process.is_running():
        row.problems.append("the process has ended")
        return row
    after, row.sent = _resident(process), 1
    row.codes[f"{before >> 20} to {after >> 20} MiB"] = 1
    if bounded and before and after > GROWTH * before:
        row.problems.append(f"grew by {after / before - 1:.0%}")
    return row


def subjects(run: str) -> list[str]:
    one = names.RunNames(run)
    return [
        one.task("sums", 1), one.evaluation_task("sums"), one.experience(OWNER, 0, "sums"),
        one.experience(OWNER, 0, "sums", blob=True), one.failure(OWNER, "sums"), one.control,
        one.evaluation(OWNER, "sums"), one.batch(1), one.batch(7), one.skip(1), one.cursor, one.dead_letter(1),
        one.blob(OWNER, "0" * 32, 0),
    ]  # fmt: skip


async def fuzz_subjects(run: BufferRun, messages: int, maker: Maker) -> list[Row]:
    """While the run trains: its steps must come, also from a buffer that starts afterwards."""
    rows, trainer = [], run.trainer()
    await trainer.begin()
    async with await connect(run.nats.url, "fuzz") as broker, explorer(run.nats.url, run.run):
        for subject in subjects(run.run):
            row = Row(subject.removeprefix(f"trinity.{run.run}."))
            for number in range(messages):
                message_id = f"fuzz/{subject}/{number}/{time.time()}"
                await broker.publish(subject, maker.outcome(), message_id=message_id, headers=maker.header())
                row.sent += 1
            if not run.buffer.is_running():
                row.problems.append("the buffer has ended")
            rows.append(row)
        row = Row("the run continues")
        for step in range(1, _STEPS + 1):
            if step == _STEPS - 1:
                run.buffer.kill()
                run.buffer.start()
            try:
                row.sent += len(await trainer.batch(step, seconds=120)) > 0
            except (TimeoutError, grpc.aio.AioRpcError) as error:
                row.problems.append(f"step {step}: {type(error).__name__} {error}"[:200])
        stats = await trainer.stats()
        if stats.fed != stats.stored + stats.dead_letters + stats.outstanding:
            row.problems.append(f"fed {stats.fed} is not stored + dead letters + outstanding (I4)")
    await trainer.close()
    return [*rows, row]


async def fuzz(calls: int, messages: int, seed: int, services: Sequence[str] = SERVICES) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="trinity-fuzz-") as name:
        folder = Path(name)
        nats = NatsServer(folder / "nats")
        nats.start()
        changes: dict[str, Any] = {"explorer": {"max_dead_letters_in_a_row": 0}}
        run = BufferRun(folder, nats, steps=_STEPS, **changes).start()
        environment = ServiceProcess("environment", folder, ATTACH_TOKEN=TOKEN).start()
        learning, trainer = start_trainer(folder / "learning", nats)
        server = grpc.aio.server(interceptors=[rpc.Edge()], options=rpc.SERVER_OPTIONS)
        explorer_pb2_grpc.add_ExplorerServiceServicer_to_server(
            ExplorerServicer(_Explorer(folder / "learning/model")), server
        )  # type: ignore[arg-type]
        here = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        processes = {"buffer": run.buffer, "sync": run.sync, "environment": environment, "trainer": trainer}
        addresses = {name: process.address for name, process in processes.items()}
        makers = {name: Maker(seed + 1, run.run, **KNOWN.get(name, {})) for name in SERVICES}
        makers["trainer"] = Maker(seed + 1, learning.run)
        makers["sync"] = Maker(seed + 1, learning.run, lease_id=[await _join(run.sync.address, learning.run)])
        try:
            rows = await fuzz_subjects(run, messages, Maker(seed, run.run)) if messages else []
            addresses |= {"explorer": here, "buffer": run.buffer.address}
            return rows + (await fuzz_rpcs(addresses, processes, calls, makers, services) if calls else [])
        finally:
            await server.stop(grace=0)
            environment.kill()
            trainer.kill()
            learning.stop()
            run.stop()
            nats.stop()


def start_trainer(folder: Path, nats: NatsServer) -> tuple[BufferRun, ServiceProcess]:
    """A real trainer, with buffer and sync service of its own run, in which no explorer answers."""
    folder.mkdir()
    model = folder / "model"
    subprocess.run([sys.executable, ROOT / "examples/quickstart/make_model.py", model], check=True, timeout=400)
    run = BufferRun(folder, nats, model={"model_path": str(model)}).start()
    settings = {"CONFIG_FILE": str(run.config_file), "BUFFER_ADDRESS": run.buffer.address, "DEVICE": "cpu"}
    trainer = ServiceProcess("trainer", folder, SYNC_ADDRESS=run.sync.address, THREADS="1", **settings)
    return run, trainer.start(_TRAINER_SECONDS)


async def _join(sync: str, run: str) -> str:
    """The lease of a member of the run, which has verified the base model: else it could end the run by its verdict."""
    async with rpc.channel(sync) as channel:
        stub = sync_pb2_grpc.SyncServiceStub(channel)
        joined = await stub.Join(sync_pb2.JoinRequest(run=run, explorer_id="fuzz"), timeout=20)
        right = [sync_pb2.CanaryReport(version=0, expected=-1.0, computed=-1.0)]
        await stub.Report(sync_pb2.ReportRequest(run=run, lease_id=joined.lease_id, canaries=right), timeout=20)
        return str(joined.lease_id)


class _Explorer:
    """An explorer whose engine says the same to everybody."""

    follower = None
    explorer_id = run_id = "fuzz"
    progress = Progress()
    limits = Limits(64, 300)
    tokens_generated = 0

    def __init__(self, model: Path) -> None:
        self.pool = self
        self.outside = OutsideSessions(Sessions(), 60.0)
        self.tokenizer = ChatTokenizer(ModelConfig(model_path=str(model)))

    def tokens_per_second(self) -> float:
        return 0.0

    async def generate(self, prompt: list[int], sampling: SamplingParams, images: Any = ()) -> list[Completion]:
        tokens = np.array([5, 6], np.int32)
        return [Completion(tokens, np.zeros(2, np.float32), (VersionSpan(0, 0, 2),), "stop")] * sampling.n

    def state(self) -> ExplorerState:
        return ExplorerState.STARTING

    async def drain(self, grace_seconds: float) -> tuple[int, int]:
        return 0, 0


def table(rows: list[Row]) -> Table:
    found = Table(title="malformed messages")
    for column in ("place", "sent", "answers", "problem"):
        found.add_column(column, overflow="fold")
    for row in rows:
        answers = ", ".join(f"{count} {code}" for code, count in row.codes.most_common())
        found.add_row(row.place, str(row.sent), answers, "; ".join(row.problems) or "-")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000, help="of each RPC")
    parser.add_argument("--messages", type=int, default=2_000, help="at each subject")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--services", type=lambda names: names.split(","), default=SERVICES, help="whose RPCs, with commas"
    )
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    rows = asyncio.run(fuzz(args.calls, args.messages, args.seed, args.services))
    Console(width=160).print(table(rows))
    violations = sum(bool(row.problems) for row in rows)
    print(f"{sum(row.sent for row in rows)} messages, {violations} places with violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
