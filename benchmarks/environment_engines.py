"""ALFWorld and ScienceWorld through the environment service against bare engines, two workers on each side.

Both sides play the same recorded games: rooms with random admissible commands, and gold paths. They take turns, in each
of which every worker plays every game once, so other load on the machine affects both. Only the time between resets
counts: a reset loads the game, which takes the engines longer than ten steps.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from buffer_table import Table, at_least, until_serving

from support.servers.service import ServiceProcess
from trinity.environments.alfworld.engine import Engine
from trinity.environments.alfworld.rooms import TASK_TYPES, draw_room
from trinity.environments.arguments import Arguments
from trinity.environments.replies import write
from trinity.environments.scienceworld import simulator
from trinity.environments.scienceworld.environment import SOLVED, ScienceWorld, load
from trinity.explorer.environments.client import EnvironmentClient
from trinity.runtime.errors import Conflict

LEAST = 0.9
WARM_TURNS = 3  # Java compiles code after many calls
ROOM_STEPS = 20
ENGINES = ("alfworld", "scienceworld")  # as environments, and as modules
# Peer of each environment, and the share of its speed that must be reached. ScienceWorld's environment lists all valid
# actions at every step. The service and the second peer play on its simulator directly.
PEERS: dict[str, dict[str, float | None]] = {
    "alfworld": {"textworld": LEAST},
    "scienceworld": {"ScienceWorldEnv": LEAST, "simulator alone": None},
}
EXPERIMENTS = ("find-living-thing", "find-non-living-thing", "find-plant", "find-animal", "identify-life-stages-1")
ARGS = {"alfworld": {"max_steps": 1000, "max_repeats": 0}, "scienceworld": {"max_steps": 1000}}


@dataclass(frozen=True)
class Game:
    task: dict[str, Any]
    actions: list[str]


class Clock:
    """Counts steps and the time they take."""

    def __init__(self) -> None:
        self._spent = 0.0
        self.steps = 0

    def begin(self) -> None:
        self._last = time.perf_counter()

    def step(self) -> None:
        now = time.perf_counter()
        self._spent += now - self._last
        self._last = now
        self.steps += 1

    @property
    def rate(self) -> float:
        return self.steps / self._spent


def record(name: str, count: int) -> list[Game]:
    """Games and their recorded actions. Raises Conflict if the engine is not installed."""
    games = []
    for number in range(count):
        if name == "scienceworld":
            task = {"task_name": EXPERIMENTS[number % len(EXPERIMENTS)], "var_num": number}
            replies = ScienceWorld.oracle(task, {}, 0)
            games.append(Game(task, [reply.partition("<action>")[2].removesuffix("</action>") for reply in replies]))
            continue
        kind = TASK_TYPES[number % len(TASK_TYPES)]
        games.append(Game({"task_type": kind, "seed": number}, wander(Engine(draw_room(kind, number)), number)))
    return games


def wander(engine: Engine, seed: int) -> list[str]:
    """Random admissible commands, until one ends the game."""
    dice, done, actions = random.Random(seed), False, []
    try:
        _, known = engine.reset()
        while not done and len(actions) < ROOM_STEPS:
            actions.append(dice.choice(known))
            _, known, done = engine.step(actions[-1])
    finally:
        engine.close()
    return actions


def play_bare(peer: str, game: Game) -> Iterator[None]:
    """The engine's own calls; yields after the reset and after each step."""
    if peer == "ScienceWorldEnv":
        yield from play_scienceworld(game)
        return
    if peer == "textworld":
        engine = Engine(draw_room(game.task["task_type"], game.task["seed"]))
        try:
            engine.reset()
            yield
            for action in game.actions:
                engine.step(action)
                yield  # the last one may end the game
        finally:
            engine.close()
        return
    machine = simulator.acquire()
    try:
        load(machine, Arguments(game.task, "task"), "easy", "train", 0)
        yield
        for action in game.actions:
            _, score, done = machine.step(action)
            yield
            if done or score == SOLVED:
                break
    finally:
        simulator.release(machine)


@cache
def scienceworld() -> Any:
    from scienceworld import ScienceWorldEnv

    os.environ["PATH"] = f"{Path(simulator.java()).parent}:{os.environ['PATH']}"
    return ScienceWorldEnv("", envStepLimit=1000)


def play_scienceworld(game: Game) -> Iterator[None]:
    """Plays games by the package's interface."""
    environment = scienceworld()
    environment.load(game.task["task_name"], game.task["var_num"], "easy")
    environment.reset()
    yield
    for action in game.actions:
        _, _, done, _ = environment.step(action)
        yield
        if done:
            break


def work(peer: str) -> None:
    """A bare worker: plays the games of each input line, and prints the steps per second."""
    for line in sys.stdin:
        clock = Clock()
        for game in json.loads(line):
            playing = play_bare(peer, Game(**game))
            next(playing)
            clock.begin()
            for _ in playing:
                clock.step()
        print(clock.rate, clock.steps, flush=True)


class Bare:
    """Processes with an engine each."""

    def __init__(self, peer: str, workers: int) -> None:
        command = [sys.executable, __file__, peer]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._workers = [subprocess.Popen(command, **pipes) for _ in range(workers)]

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def play(self, games: Sequence[Game]) -> tuple[float, int]:
        """Steps per second of all workers together, and number of steps."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps([vars(game) for game in games]) + "\n")
            worker.stdin.flush()
        lines = [worker.stdout.readline().split() for worker in self._workers if worker.stdout is not None]
        return sum(float(rate) for rate, _ in lines), sum(int(steps) for _, steps in lines)

    def end(self) -> None:
        for worker in self._workers:
            worker.communicate(timeout=20)


async def play_through(client: EnvironmentClient, name: str, games: Sequence[Game], workers: int) -> tuple[float, int]:
    """Steps per second, and number of steps, of one episode per worker in parallel."""

    async def play() -> Clock:
        clock = Clock()
        for game in games:
            async with client.episode(name, game.task, ARGS[name]) as episode:
                await episode.reset()
                clock.begin()
                for action in game.actions:
                    done = (await episode.step(write(action))).done
                    clock.step()
                    if done:
                        break
        return clock

    clocks = await asyncio.gather(*(play() for _ in range(workers)))
    return sum(clock.rate for clock in clocks), sum(clock.steps for clock in clocks)


def cpu_seconds(*pids: int) -> float:
    """CPU seconds of these processes and of their living descendants."""
    total = 0.0
    for pid in pids:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@dataclass(frozen=True)
class Turn:
    """One turn of one side."""

    steps_per_second: float
    cpu_per_step: float  # seconds, resets included


async def turn(playing: Awaitable[tuple[float, int]], *pids: int) -> Turn:
    before = cpu_seconds(*pids)
    rate, steps = await playing
    return Turn(rate, (cpu_seconds(*pids) - before) / steps)


async def compare(name: str, peer: str, games: Sequence[Game], args: argparse.Namespace) -> list[tuple[Turn, Turn]]:
    """Plays both sides: bare engines and the service."""
    with tempfile.TemporaryDirectory() as folder:
        service = ServiceProcess("environment", Path(folder), LOG_LEVEL="WARNING").start(wait_seconds=0)
        bare = Bare(peer, args.workers)
        try:
            await until_serving(service)
            client = EnvironmentClient(service.address, wait_seconds=60)
            found = []
            for _ in range(WARM_TURNS + args.turns):
                alone = await turn(asyncio.to_thread(bare.play, games), *bare.pids)
                through = play_through(client, name, games, args.workers)
                found.append((alone, await turn(through, os.getpid())))
            await client.close()
            return found[WARM_TURNS:]
        finally:
            bare.end()
            service.stop()


def figures(found: Sequence[tuple[Turn, Turn]], least: float | None) -> tuple[str, ...]:
    """The columns of a comparison."""
    bare, ours = (mean(side.steps_per_second for side in sides) for sides in zip(*found, strict=True))
    bare_cpu, our_cpu = (f"{1e3 * mean(side.cpu_per_step for side in sides):.1f}" for sides in zip(*found, strict=True))
    singles = ", ".join(f"{one.steps_per_second / alone.steps_per_second:.2f}" for alone, one in found)
    limit = "" if least is None else at_least(ours / bare, least)
    return f"{bare:,.1f}", f"{ours:,.1f}", f"{ours / bare:.2f}", limit, singles, our_cpu, bare_cpu


async def measure_engines(args: argparse.Namespace) -> None:
    table = Table(
        f"engines, {args.workers} workers a side",
        (
            "engine",
            "bare",
            "bare steps/s",
            "service steps/s",
            "ratio",
            "limit",
            "single ratios",
            "CPU ms a step",
            "of bare",
        ),
        [f"the same games on both sides in turns, {args.turns} times {args.games} games a worker"],
    )
    for name in ENGINES:
        if args.tiny and table.rows:
            break  # one engine shows that it runs
        if find_spec(name) is None:
            table.notes.append(f"{name} is skipped: it is not installed (pip install -e '.[{name}]')")
            continue
        try:
            games = record(name, args.games)
        except Conflict as missing:
            table.notes.append(f"{name} is skipped: {missing}")
            continue
        for peer, least in PEERS[name].items():
            table.rows.append((name, peer, *figures(await compare(name, peer, games, args), least)))
    simulator.end_all()
    table.show()


if __name__ == "__main__":
    work(sys.argv[1])
