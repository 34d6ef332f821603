"""Episodes through gRPC against direct calls, a thousand episodes open at once, and engines through the service.

    python benchmarks/environment.py [steps] [open] [engines] [--seconds 5] [--episodes 64] [--tiny]

The environment is trivial, so the figures show the cost of the calls: 64 episodes in parallel, each of 50 steps, played
by the explorer's client, as one process on one core. The other side is one process on the other core: the SDK's server,
or the environment service. An attached provider and the service are two processes on any core.

`engines`: ALFWorld and ScienceWorld, if they are installed; see environment_engines.py.
"""

import argparse
import asyncio
import gc
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
from buffer_table import Table, at_least, at_most, until_serving
from environment_engines import measure_engines

from support.servers.service import ServiceProcess
from trinity.explorer.environments.client import EnvironmentClient
from trinity.reading.nats import wait_until_open
from trinity.runtime.process import free_port
from trinity.sdk import Environment, Observation, attach, serve

PARTS = ("steps", "open", "engines")
LEAST_STEPS, LEAST_ATTACHED = 3000, 1500
MOST_GROWTH_MIB = 8.0
STEPS = 50
TEXT = "You are in a kitchen. There is a table here, and on it a cup, a plate and an apple. " * 3
TOKEN = "benchmark"


class Trivial(Environment):
    """Returns the same observation at every step, and ends after the number of steps in the task."""

    isolation = "none"

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        self.left = task["steps"]
        return Observation(TEXT)

    def step(self, action: str) -> Observation:
        self.left -= 1
        return Observation(TEXT, reward=0.5, done=self.left == 0, info={"left": self.left}, metrics={"steps": 1.0})


def pin(pid: int, cores: Sequence[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, cores)


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def direct(seconds: float) -> float:
    """Steps per second of direct calls of the class."""
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        environment = Trivial()
        environment.reset({"steps": STEPS}, {}, 0)
        while not environment.step("look").done:
            steps += 1
        environment.close()
    return steps / (time.perf_counter() - begin)


async def through(client: EnvironmentClient, episodes: int, seconds: float) -> float:
    """Steps per second of this many parallel episodes, each followed by the next."""
    steps = 0
    stop = time.perf_counter() + seconds

    async def play() -> None:
        nonlocal steps
        while time.perf_counter() < stop:
            async with client.episode("trivial", {"steps": STEPS}) as episode:
                step = await episode.reset()
                while not step.done:
                    step = await episode.step("look")
                    steps += 1

    begin = time.perf_counter()
    await asyncio.gather(*(play() for _ in range(episodes)))
    return steps / (time.perf_counter() - begin)


@asynccontextmanager
async def provider(folder: Path, kind: str) -> AsyncIterator[tuple[str, list[int]]]:
    """A provider in a separate process: its address, and the processes of that side."""
    command = [sys.executable, __file__, "--provide", kind]
    if kind == "serve":
        port = free_port()
        address = f"127.0.0.1:{port}"
        process = subprocess.Popen([*command, address])  # noqa: ASYNC220 - returns at once
        try:
            # An explorer waits only seconds for a provider that is away; on a busy machine a start takes longer.
            if not await asyncio.to_thread(wait_until_open, "127.0.0.1", port, 60):
                raise SystemExit(f"the provider at {address} did not start within 60 s")
            yield address, [process.pid]
        finally:
            process.terminate()
            process.wait(20)
        return
    service = ServiceProcess("environment", folder, ATTACH_TOKEN=TOKEN, LOG_LEVEL="WARNING").start(wait_seconds=0)
    await until_serving(service)
    process = subprocess.Popen([*command, service.address])  # noqa: ASYNC220
    try:
        yield service.address, [service.pid, process.pid]
    finally:
        process.terminate()
        process.wait(20)
        service.stop()


async def measure_steps(args: argparse.Namespace) -> None:
    table = Table(
        "steps/s, one core a side",
        ("path", "steps/s", "limit", "microseconds a step", "of direct"),
        [f"{args.episodes} episodes in parallel, {STEPS} steps each, observations of {len(TEXT)} characters"],
    )
    plain = direct(min(args.seconds, 1.0))
    table.rows.append(("direct calls", f"{plain:,.0f}", "", f"{1e6 / plain:.1f}", ""))
    ours, theirs = cores()[:1], cores()[1:2] or cores()[:1]
    for name, kind, limit in (
        ("gRPC, the SDK's serve", "serve", LEAST_STEPS),
        ("attached, through the environment service", "attach", LEAST_ATTACHED),
    ):
        with tempfile.TemporaryDirectory() as folder:
            async with provider(Path(folder), kind) as (address, pids):
                if kind == "serve":
                    pin(0, ours)
                    pin(pids[0], theirs)
                client = EnvironmentClient(address, wait_seconds=60)
                await through(client, args.episodes, min(args.seconds, 1.0))
                rate = await through(client, args.episodes, args.seconds)
                await client.close()
                pin(0, cores_at_start)
        table.rows.append((name, f"{rate:,.0f}", at_least(rate, limit), f"{1e6 / rate:.1f}", f"{rate / plain:.4f}"))
    table.show()


async def measure_open(args: argparse.Namespace) -> None:
    """Opens all episodes at once, repeatedly, and measures the memory that remains."""
    table = Table(
        f"{args.open:,} episodes open at once, {args.rounds} times",
        ("path", "seconds a round", "MiB, first half", "MiB, second half", "growth MiB", "limit"),
        ["resident memory of the provider's side and of the client after episodes have ended, the most of any round"],
    )
    for name, kind in (("gRPC, the SDK's serve", "serve"), ("attached, through the environment service", "attach")):
        with tempfile.TemporaryDirectory() as folder:
            async with provider(Path(folder), kind) as (address, pids):
                client = EnvironmentClient(address, wait_seconds=60)
                sizes, begin = [], time.perf_counter()
                for _ in range(args.rounds):
                    await open_at_once(client, args.open)
                    await asyncio.sleep(0.3)
                    gc.collect()
                    sizes.append(sum(psutil.Process(pid).memory_info().rss for pid in (*pids, os.getpid())) / 2**20)
                seconds = (time.perf_counter() - begin) / args.rounds - 0.3
                await client.close()
        # The first rounds fill the allocators' pools. Later rounds return varying parts of them.
        settled = sizes[2:] if len(sizes) > 3 else sizes
        half = len(settled) // 2
        early, late = max(settled[:half]), max(settled[half:])
        growth = late - early
        figures = (f"{seconds:.2f}", f"{early:.0f}", f"{late:.0f}", f"{growth:.1f}")
        table.rows.append((name, *figures, at_most(growth, MOST_GROWTH_MIB)))
    table.show()


async def open_at_once(client: EnvironmentClient, count: int) -> None:
    barrier = asyncio.Barrier(count)

    async def play() -> None:
        async with client.episode("trivial", {"steps": 2}) as episode:
            await episode.reset()
            await barrier.wait()
            await episode.step("look")
            await episode.step("look")

    await asyncio.gather(*(play() for _ in range(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--episodes", type=int, default=64, help="in parallel")
    parser.add_argument("--open", type=int, default=1000, help="episodes open at once")
    parser.add_argument("--rounds", type=int, default=10, help="times that they are opened")
    parser.add_argument("--games", type=int, default=4, help="different games of each engine")
    parser.add_argument("--workers", type=int, default=2, help="engines on each side")
    parser.add_argument("--turns", type=int, default=4, help="of each side of `engines`")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    parser.add_argument("--provide", nargs=2, metavar=("KIND", "ADDRESS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.provide:
        kind, address = args.provide
        serve(Trivial, address=address) if kind == "serve" else attach(Trivial, address=address, token=TOKEN)
        return
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.tiny:
        args.seconds, args.open, args.rounds = 0.3, 50, 2
        args.games, args.workers, args.turns = 1, 1, 1
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    for name in args.parts or PARTS:
        asyncio.run(MEASURES[name](args))


MEASURES = dict(zip(PARTS, (measure_steps, measure_open, measure_engines), strict=True))
cores_at_start = cores()

if __name__ == "__main__":
    main()
