"""Stops a process until it is told to continue."""

import os
import signal
import time
from pathlib import Path

_LIMIT_SECONDS = 20.0


def freeze(pid: int) -> None:
    """SIGSTOP, and return once every thread has stopped, because threads may answer for a moment after the signal."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} has not stopped within {_LIMIT_SECONDS:g} s"
        time.sleep(0.001)


def thaw(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def _state(task: Path) -> str:
    """The kernel's letter for the thread, T when it is stopped; see proc(5)."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
