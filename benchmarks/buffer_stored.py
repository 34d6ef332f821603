"""A buffer with many small groups in its log: time to recover from kill -9, and memory."""

import argparse
import asyncio
import contextlib
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

import nats
from buffer_table import Table, at_most, until_serving

from support.fakes.data.experience import make_group, make_task
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import experience_pb2
from trinity.buffer.state.streams import stream_specs
from trinity.data.experience import Task
from trinity.data.wire import fill_group, task_to_proto
from trinity.runtime import headers, names
from trinity.runtime.broker import connect, ensure_streams

RESTART_SECONDS, MEMORY_MIB = 5.0, 500.0
PER_STEP = 32
TOKENS = 8
_WINDOW = 4096
_JUDGE_SECONDS = 3600.0
_LOG_GIB = "8"
_DURABLE, _QUICK = "sync_interval: always", "sync_interval: 10s"


@dataclass(frozen=True)
class Start:
    """Seconds from the start of the process until it is SERVING, and until a trainer has the next batch."""

    serving: float
    batch: float


class Stored:
    """A run whose task stream and log are written before the buffer starts.

    prepare -> start -> ... The streams are filled on a nats-server that syncs rarely. It syncs every message again
    before measurements.
    """

    def __init__(self, folder: Path, tasks: int) -> None:
        self._folder = folder
        self._tasks = tasks
        self.nats = NatsServer(folder / "nats")
        self.run = BufferRun(
            folder,
            self.nats,
            steps=tasks // PER_STEP,
            groups=PER_STEP,
            settings={"LOG_GIB": _LOG_GIB},
            algorithm={"algorithm_type": "grpo", "repeat_times": 1},
            synchronizer={"sync_interval": 10_000_000},
        )

    async def prepare(self, groups: int) -> None:
        """Feed every task, store the groups of the first ones, start sync, make version 0 LIVE."""
        self._start_nats(durable=False)
        async with await connect(self.nats.url, "bench") as broker:
            log_bytes = int(float(_LOG_GIB) * 2**30)
            await ensure_streams(broker, stream_specs(names.RunNames(self.run.run), log_bytes=log_bytes, replicas=0))
        await self._publish(self._task_messages())
        await self.store(range(1, groups + 1))
        self.nats.stop()
        self._start_nats()
        self.run.sync.start(wait_seconds=0)
        await until_serving(self.run.sync)
        trainer = self.run.trainer()
        await trainer.begin()
        await trainer.close()

    async def store(self, ordinals: Iterable[int]) -> None:
        """Put the groups of these tasks into the log, in this order, like explorers."""
        await self._publish(self._group_messages(ordinals))

    def _task(self, ordinal: int) -> Task:
        return make_task(ordinal, run=self.run.run, repeat_times=1)

    def _task_messages(self) -> Iterable["_Message"]:
        run, message = names.RunNames(self.run.run), task_to_proto(self._task(1))
        for ordinal in range(1, self._tasks + 1):
            message.task_id, message.ordinal, message.row = f"sums/0/{ordinal}", ordinal, ordinal
            header = {headers.POSITION: str(ordinal), headers.FED: str(ordinal), "Nats-Msg-Id": message.task_id}
            yield run.task("sums", ordinal), message.SerializeToString(), header

    def _group_messages(self, ordinals: Iterable[int]) -> Iterable["_Message"]:
        outcome = experience_pb2.Outcome()
        fill_group(outcome.group, make_group(self._task(1), response=TOKENS))
        owner, task = names.owner_of(outcome.group.explorer_id), outcome.group.task
        subject = names.RunNames(self.run.run).experience(owner, 0, "sums")
        for ordinal in ordinals:
            task.task_id, task.ordinal, task.row = f"sums/0/{ordinal}", ordinal, ordinal
            data = outcome.SerializeToString()
            marks = {headers.CRC32: str(zlib.crc32(data)), headers.ORDINAL: str(ordinal), "Nats-Msg-Id": task.task_id}
            yield subject, data, marks

    async def _publish(self, messages: Iterable["_Message"]) -> None:
        client = await nats.connect(self.nats.url, pending_size=64 * 1024 * 1024)
        js = client.jetstream(publish_async_max_pending=_WINDOW)
        for subject, data, header in messages:
            await js.publish_async(subject, data, headers=header)
        await js.publish_async_completed()
        await client.close()

    async def take(self, steps: Iterable[int]) -> None:
        """Take the batches of these steps in order, like a trainer."""
        trainer, wanted = self.run.trainer(), list(steps)
        call = trainer.buffer.StreamBatches(pb.StreamBatchesRequest(run=self.run.run, from_step=wanted[0]))
        async for part in call:
            if part.WhichOneof("part") == "end" and part.end.step == wanted[-1]:
                call.cancel()
                break
        await trainer.close()

    async def ledger_ends_at(self, step: int) -> None:
        trainer = self.run.trainer()
        async with asyncio.timeout(_JUDGE_SECONDS):
            while (await trainer.stats()).ledger_step < step:
                await asyncio.sleep(0.1)
        await trainer.close()

    async def judged(self, groups: int) -> None:
        """Wait until the buffer has stored this many groups."""
        trainer = self.run.trainer()
        async with asyncio.timeout(_JUDGE_SECONDS):
            while (stats := await trainer.stats()).stored < groups:
                assert not stats.refused and not stats.dead_letters, stats
                await asyncio.sleep(0.2)
        await trainer.close()

    async def start(self, next_step: int) -> Start:
        """Start the killed buffer, and request a batch like a resumed trainer."""
        begin = time.perf_counter()
        self.run.buffer.start(wait_seconds=0)
        await until_serving(self.run.buffer)
        serving = time.perf_counter() - begin
        await self.take([next_step])
        return Start(serving, time.perf_counter() - begin)

    def _start_nats(self, durable: bool = True) -> None:
        config = self._folder / "nats/nats.conf"
        text = config.read_text()
        assert _DURABLE in text or _QUICK in text, text
        config.write_text(text.replace(_QUICK, _DURABLE) if durable else text.replace(_DURABLE, _QUICK))
        self.nats.start()

    def save(self, name: str) -> None:
        """Copy the broker's store, for a second measurement. The buffer is stopped."""
        self.nats.stop()
        shutil.copytree(self._folder / "nats/store", self._folder / name)
        self._start_nats()

    def restore(self, name: str, durable: bool = True) -> None:
        self.nats.stop()
        shutil.rmtree(self._folder / "nats/store")
        shutil.copytree(self._folder / name, self._folder / "nats/store")
        self._start_nats(durable)

    def memory(self) -> tuple[float, float]:
        """Current and peak resident memory of the buffer's process, in MiB."""
        status = Path(f"/proc/{self.run.buffer.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return tuple(int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]

    def stop(self) -> None:
        self.run.stop()
        self.nats.stop()


_Message = tuple[str, bytes, dict[str, str]]


@contextlib.asynccontextmanager
async def stored(groups: int, tasks: int) -> AsyncIterator[Stored]:
    """A run with this many groups in its log and this many tasks fed. The buffer is not started."""
    with tempfile.TemporaryDirectory() as folder:
        run = Stored(Path(folder), tasks)
        try:
            await run.prepare(groups)
            yield run
        finally:
            run.stop()


async def restart(args: argparse.Namespace) -> Table:
    """Kills the buffer with -9 and starts it again, with a long log."""
    logged, unjudged = (count - count % PER_STEP for count in (args.logged, args.unjudged))
    table = Table(
        f"restart after kill -9: medians of {args.runs} starts",
        ("log", "seconds to SERVING", "to the next batch", "limit"),
        [
            f"{logged:,} groups are in the log and in the ledger; from the start of the process",
            f"not judged: {unjudged:,} more came while there was no buffer, and the next batch is of them",
        ],
    )
    step, more = logged // PER_STEP, range(logged + 1, logged + unjudged + 1)
    async with stored(logged, logged + unjudged) as run:
        await run.start(1)
        await run.take(range(1, step - 1))
        await run.ledger_ends_at(step)
        run.run.buffer.kill()
        run.save("up to date")
        cases = {
            "ledger up to date": (step - 1, []),
            "not judged, in order": (step + 1, [*more]),
            "not judged, the batch's last group is the newest": (step + 1, [*more[1:], more[0]]),
        }
        for name, (next_step, ordinals) in cases.items():
            run.restore("up to date", durable=False)
            await run.store(ordinals)
            run.save(name)
            starts = []
            for _ in range(args.runs):
                run.restore(name)
                starts.append(await run.start(next_step))
                run.run.buffer.kill()
            serving = statistics.median(start.serving for start in starts)
            batch = statistics.median(start.batch for start in starts)
            table.rows.append((name, f"{serving:.2f}", f"{batch:.2f}", at_most(max(serving, batch), RESTART_SECONDS)))
    return table


async def memory(args: argparse.Namespace) -> Table:
    """Resident memory of the process after it has validated the whole log."""
    groups = args.stored - args.stored % PER_STEP
    table = Table(
        f"memory with {groups:,} groups stored",
        ("groups", "seconds", "MiB resident", "at most", "limit"),
        [f"groups of one response of {TOKENS} tokens; the limit is meant for 1,000,000 of them"],
    )
    async with stored(groups, groups) as run:
        run.save("not judged")
        for name, takes in (("all taken by the trainer", True), ("none taken, all wait in the pool", False)):
            run.restore("not judged")
            begin = time.perf_counter()
            run.run.buffer.start(wait_seconds=0)
            await until_serving(run.run.buffer)
            if takes:
                await run.take(range(1, groups // PER_STEP + 1))
            await run.judged(groups)
            seconds, (resident, most) = time.perf_counter() - begin, run.memory()
            run.run.buffer.kill()
            limit = at_most(resident, MEMORY_MIB)
            table.rows.append((name, f"{seconds:.0f}", f"{resident:.0f}", f"{most:.0f}", limit))
    return table
