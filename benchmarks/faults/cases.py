"""The faults, and the numbers of steps after which they strike."""

import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil


@dataclass
class Run:
    """A live run. `trainer`: id of the process that computed the newest step."""

    root: psutil.Process  # of the system's processes
    trainer: Callable[[], int]
    random: random.Random
    restart: Callable[[], None]  # types the command again

    def processes(self) -> list[psutil.Process]:
        return [self.root, *self.root.children(recursive=True)]


@dataclass(frozen=True)
class Case:
    name: str
    about: str
    strike: Callable[[Run], None] | None = None
    at: Sequence[float] = ()  # shares of the steps
    grader: Mapping[str, Sequence[float]] = field(default_factory=dict)  # shares of the rows


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
    run.restart()


def stop_trainer(run: Run) -> None:
    pid = run.trainer()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(20)
    os.kill(pid, signal.SIGCONT)


CASES = [
    Case("none", "nothing is done"),
    Case("kill-trainer", "kill -9 of the process that trains, twice", kill_trainer, (0.3, 0.68)),
    Case("kill-any", "kill -9 of a random process, three times", kill_any, (0.2, 0.45, 0.7)),
    Case("kill-all", "kill -9 of all processes; the command is typed again", kill_all, (0.53,)),
    Case("stop-trainer", "SIGSTOP of the process that trains, for 20 s", stop_trainer, (0.4,)),
    Case("grader-fails", "the grader raises for three responses, once each", grader={"raises": (0.25, 0.5, 0.75)}),
    Case("grader-hangs", "one call of the grader never returns", grader={"hangs": (0.6,)}),
]
