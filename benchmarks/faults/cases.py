"""The faults, and the numbers of steps after which they strike."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from audit import read

DISK_MB = 512  # of the small file system of a full disk
FULL_SECONDS, CUT_SECONDS, SLOW_SECONDS, STOPPED_SECONDS = 25.0, 20.0, 40.0, 20.0
OPEN_SECONDS = 120.0  # until an episode is open


@dataclass
class Run:
    """A live run. `trainer`: id of the process that computed the newest step."""

    root: psutil.Process  # of the system's processes
    trainer: Callable[[], int]
    sampler: Callable[[psutil.Process], psutil.Process | None]  # the process that samples, of a system that has one
    random: random.Random
    folder: Path
    number: int  # of this strike
    again: Callable[[], None]  # types the command again
    beside: Callable[[str], subprocess.Popen[bytes]]  # starts another command of the system, by its name

    def processes(self) -> list[psutil.Process]:
        return [self.root, *self.root.children(recursive=True)]

    def engine(self) -> psutil.Process:
        found = self.sampler(self.root)
        assert found is not None, "the case is only for systems with such a process"
        return found


@dataclass(frozen=True)
class Case:
    """The case skips systems without the part `needs`. `within`: the small disk or the network that it plays in."""

    name: str
    about: str
    strike: Callable[[Run], None] | None = None
    at: Sequence[float] = ()  # shares of the steps
    grader: Mapping[str, Sequence[float]] = field(default_factory=dict)  # shares of the rows
    needs: str = ""
    within: str = ""  # "disk" or "network"
    slow_disk: bool = False
    runs: int = 1  # three where randomness decides
    turns: int = 1  # of an episode

    @property
    def plain(self) -> str:
        """The undisturbed case that this one is compared with."""
        return "none" if self.turns == 1 else "turns"


def kill_trainer(run: Run) -> None:
    os.kill(run.trainer(), signal.SIGKILL)


def kill_any(run: Run) -> None:
    """Kills any process but the supervisor, which nothing restarts."""
    victims = [process for process in run.processes()[1:] if process.is_running()]
    run.random.choice(victims).kill()


def kill_all(run: Run) -> None:
    """A machine that loses its power; then its user types the command again."""
    for process in run.processes():
        process.kill()
    run.again()


def kill_engine(run: Run) -> None:
    run.engine().kill()


def kill_in_episode(run: Run) -> None:
    """Kills what samples between the turns of an episode: the explorer, then its engine; or the one process."""
    _wait_for_open_episode(run.folder / "records")
    engine = run.sampler(run.root)
    victim = psutil.Process(run.trainer()) if engine is None else engine if run.number else engine.parent()
    assert victim is not None
    victim.kill()


def _wait_for_open_episode(records: Path) -> None:
    """Returns after the tool's next answer to a second or later turn. Raises TimeoutError without one."""
    begin, end = time.time(), time.monotonic() + OPEN_SECONDS
    while time.monotonic() < end:
        newest = read(records, "tool")[-1:]
        if newest and newest[0]["time"] > begin and len(newest[0]["said"]) > 2 and not newest[0]["done"]:
            return
        time.sleep(0.02)
    raise TimeoutError(f"no episode was open for {OPEN_SECONDS:g} s")


def stop_trainer(run: Run) -> None:
    _stopped(run.trainer(), STOPPED_SECONDS)


def _stopped(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:  # its system killed it, and started another
        return


def fill_disk(run: Run) -> None:
    """Fills the run's file system, and fills it again as bytes become free."""
    ballast = Path(f"/proc/{run.root.pid}/root{run.folder}/disk/ballast")
    end = time.monotonic() + FULL_SECONDS
    with ballast.open("wb", buffering=0) as file:
        while time.monotonic() < end:
            try:
                file.write(b"x" * 65_536)
            except OSError:
                time.sleep(0.01)
    ballast.unlink()


def cut_link(run: Run) -> None:
    """No packet comes from one process of the run to another."""
    for state, seconds in (("down", CUT_SECONDS), ("up", 0.0)):
        subprocess.run(
            ["nsenter", "-t", str(run.root.pid), "-n", "ip", "link", "set", "lo", state], check=True, timeout=20
        )
        time.sleep(seconds)


def slow_engine(run: Run) -> None:
    """The engine works a tenth of the time."""
    engine, end = run.engine(), time.monotonic() + SLOW_SECONDS
    while time.monotonic() < end and engine.is_running():
        _stopped(engine.pid, 0.9)
        time.sleep(0.1)


def wrong_engine(run: Run) -> None:
    tell_engine(run, "noise")


def stale_engine(run: Run) -> None:
    tell_engine(run, "stale")


def tell_engine(run: Run, how: str) -> None:
    """Tells the engine's probe how to damage all later loads of weights, until the process ends."""
    new = run.folder / "engine.new"
    new.write_text(json.dumps({"how": how, "pid": run.engine().pid}))
    new.rename(run.folder / "engine.json")


def explorers(run: Run) -> None:
    """Another explorer joins, the engine of the first is killed, the other leaves."""
    if run.number == 0:
        run.beside("join")
    elif run.number == 1:
        run.engine().kill()
    else:
        run.beside("leave")


def attack(run: Run) -> None:
    done = run.beside("attack")
    done.wait(120)


def roll_back(run: Run) -> None:
    done = run.beside("rollback")
    done.wait(120)


CASES = [
    Case("none", "nothing is done"),
    Case("kill-trainer", "kill -9 of the process that trains, twice", kill_trainer, (0.3, 0.68)),
    Case("kill-any", "kill -9 of a random process, three times", kill_any, (0.2, 0.45, 0.7), runs=3),
    Case("kill-engine", "kill -9 of what samples, twice", kill_engine, (0.3, 0.68), needs="engine"),
    Case("kill-all", "kill -9 of all; the command is typed again", kill_all, (0.53,)),
    Case("stop-trainer", f"SIGSTOP of the process that trains, {STOPPED_SECONDS:g} s", stop_trainer, (0.4,)),
    Case("disk-slow", "each flush of a file takes 0.5 s more, each large write 0.1 s", slow_disk=True),
    Case("disk-full", f"the disk is full for {FULL_SECONDS:g} s", fill_disk, (0.4,), within="disk"),
    Case("link-cut", f"no packet passes between processes for {CUT_SECONDS:g} s", cut_link, (0.4,), within="network"),
    Case("grader-fails", "the grader raises for three responses", grader={"raises": (0.25, 0.5, 0.75)}),
    Case("grader-nan", "the grader returns NaN for three responses", grader={"nan": (0.25, 0.5, 0.75)}),
    Case("grader-hangs", "one call of the grader never returns", grader={"hangs": (0.6,)}),
    Case("engine-slow", f"the engine works a tenth of the time for {SLOW_SECONDS:g} s", slow_engine, (0.4,),
         needs="engine"),
    Case("engine-wrong", "the engine loads noise and says that it loaded the weights", wrong_engine, (0.4,),
         needs="engine"),
    Case("engine-stale", "the engine loads old weights and says that it loaded the new ones", stale_engine, (0.4,),
         needs="engine"),
    Case("explorers", "an explorer joins, the engine of the first is killed, the other leaves", explorers,
         (0.25, 0.5, 0.75), needs="explorers"),
    Case("attacked", "groups forged by a stranger and as another explorer; calls by both that change a run", attack,
         (0.4,), needs="services"),
    Case("turns", "episodes of four turns; nothing is done", needs="turns", turns=4),
    Case("turns-kill", "kill -9 of what samples, twice, in episodes of four turns", kill_in_episode, (0.3, 0.68),
         needs="turns", turns=4),
    Case("rollback", "the operator rolls back to the weights of two versions ago", roll_back, (0.6,),
         needs="versions"),
]  # fmt: skip
