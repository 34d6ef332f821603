"""Throughput of buffer and NATS under attack, compared with rounds that are left alone.

    python tests/security/throughput.py [--pairs 6] [--seconds 20] [--pause 1]

Real buffer, sync, environment service and nats-server with users for each role; an explorer and a trainer without
engines (support/fakes/peers.py), so that buffer and NATS are all that works. Rounds with and without the attacks of
attacks.py alternate, beginning with each in turn. An attacked round plays one attack after the other, with a pause
as attacks.py has.
Prints, for each pair, the ratio of groups stored per processor second of buffer and nats-server, which a busy machine
changes less than groups per second; then the medians. Groups that an attack had refused are not among the stored.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

import attacks

from support.fakes.peers import explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from support.servers.service import ServiceProcess
from trinity.reading.job import ProcessRecord, SupervisorRecord
from trinity.runtime.broker import connect
from trinity.runtime.trust.tokens import make_tokens

STEPS = 100_000
INTERVAL = 100  # steps between versions
# Attacks that start an explorer of their own, or keep a task from the run's explorer for many seconds.
LEFT_OUT = {name for name in attacks.ATTACKS if "record" in name}
WARM_SECONDS = 10.0


@dataclass
class Round:
    """Groups stored, seconds, processor seconds of buffer and nats-server, and attacks played."""

    groups: int
    seconds: float
    busy_seconds: float
    attacks: int

    @property
    def per_busy_second(self) -> float:
        return self.groups / self.busy_seconds

    @property
    def per_second(self) -> float:
        return self.groups / self.seconds


class Measured:
    """A live run, and what its buffer and nats-server have done."""

    def __init__(self, target: attacks.Target, pids: list[int]) -> None:
        self._target = target
        self._processes = [psutil.Process(pid) for pid in pids]
        known = {**attacks.ATTACKS, **attacks.OF_OWN_NATS}
        self._attacks = itertools.cycle([(name, known[name]) for name in known if name not in LEFT_OUT])
        self.played: set[str] = set()

    def _busy(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    async def round(self, seconds: float, attacked: bool, pause: float) -> Round:
        first, busy, begin = (await self._target.stats()).stored, self._busy(), time.monotonic()
        played = 0
        while attacked and time.monotonic() < begin + seconds:  # an attack that is cut would keep its task's lease
            name, work = next(self._attacks)
            await work(self._target)
            await self._target.let_go()
            self.played.add(name)
            played += 1
            await asyncio.sleep(pause)
        await asyncio.sleep(max(0.0, begin + seconds - time.monotonic()))
        await self._target.let_go()
        groups = (await self._target.stats()).stored - first
        return Round(groups, time.monotonic() - begin, self._busy() - busy, played)


async def measure(folder: Path, pairs: int, seconds: float, pause: float) -> list[tuple[Round, Round]]:
    """Pairs of a round that is left alone and an attacked one."""
    identities = folder / "job/identity"
    server = NatsServer(folder / "nats", users=identities / "nats")
    server.start()
    os.environ |= {"TRINITY_NATS_CREDS": str(server.admin()), "TRINITY_SYNC_CLAIM_SECONDS": "3600"}
    make_tokens(identities)
    changes = {"explorer": {"max_dead_letters_in_a_row": 0}, "synchronizer": {"sync_interval": INTERVAL}}
    run = BufferRun(folder, server, steps=STEPS, identities=identities, **changes).start()
    environment = ServiceProcess("environment", folder, IDENTITY_FOLDER=str(identities)).start()
    trainer = run.trainer()
    services = {"buffer": run.buffer, "sync": run.sync, "environment": environment}
    processes = [ProcessRecord(name, name, one.pid, one.address) for name, one in services.items()]
    record = SupervisorRecord(os.getpid(), "both", run.run, "", server.url, processes, str(server.users))
    (folder / "job/run").mkdir()
    (folder / "job/run.yaml").write_text(run.config_file.read_text())
    (folder / "job/run/main.json").write_text(json.dumps(asdict(record)))

    found = []
    try:
        await trainer.begin()
        await trainer.claim()
        async with (
            explorer(server.url, run.run, seconds=0.02),
            await connect(server.url, "outsider", creds=server.admin()) as broker,
        ):
            training = asyncio.create_task(trainer.train(STEPS, INTERVAL, folder))
            measured = Measured(attacks.Target(folder / "job", broker, server.admin()), [run.buffer.pid, server.pid])
            await asyncio.sleep(WARM_SECONDS)
            for number in range(pairs):
                order = (False, True) if number % 2 == 0 else (True, False)
                rounds = {attacked: await measured.round(seconds, attacked, pause) for attacked in order}
                found.append((rounds[False], rounds[True]))
                print(line(f"pair {number + 1}", *found[-1]), flush=True)
            assert not training.done(), training
            training.cancel()
            print(f"{len(measured.played)} kinds of attacks were played")
    finally:
        await trainer.close()
        environment.kill()
        run.stop()
        server.kill()
    return found


def line(name: str, alone: Round, attacked: Round) -> str:
    ratio = attacked.per_busy_second / alone.per_busy_second
    return (
        f"{name}: {alone.per_busy_second:.0f} groups a processor second alone, {attacked.per_busy_second:.0f} beside "
        f"{attacked.attacks} attacks: {ratio:.2f} (groups a second {attacked.per_second / alone.per_second:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds after each attack")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder), given.pairs, given.seconds, given.pause))
    busy = [attacked.per_busy_second / alone.per_busy_second for alone, attacked in found]
    wall = [attacked.per_second / alone.per_second for alone, attacked in found]
    noise = [one.per_busy_second for one, _ in found]
    print(
        f"median ratio {statistics.median(busy):.2f} ({min(busy):.2f} to {max(busy):.2f}) of groups a processor second "
        f"and {statistics.median(wall):.2f} ({min(wall):.2f} to {max(wall):.2f}) of groups a second; "
        f"rounds that are left alone differ by {max(noise) / min(noise) - 1:.0%}"
    )


if __name__ == "__main__":
    main()
