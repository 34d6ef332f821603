"""Ends a command by signals: the first lets it save and stop, the second kills the started processes."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator

from trinity.reading.errors import RunError
from trinity.runtime.process import ending_signals, leave_terminal


class Interrupted(RunError):
    """Ended by a signal."""


class Ending(asyncio.Event):
    """Set by the first signal. `at_once` is set by the second one; `then` tells what the same command does next."""

    def __init__(self, then: str = "the same command resumes the run") -> None:
        super().__init__()
        self.at_once = asyncio.Event()
        self.then = then
        self.signal = ""  # name of the first one


@contextlib.contextmanager
def ended_by_signals(ending: Ending) -> Iterator[None]:
    """Signals that end a process set `ending`; after the block they raise Interrupted.

    They are SIGINT, SIGTERM and, unless it is ignored, SIGHUP: closing the terminal of a run saves and stops it.
    """
    received: list[int] = []

    def on_signal(signum: int) -> None:
        if signum == signal.SIGHUP:
            leave_terminal()
        if received:
            ending.at_once.set()
        received.append(signum)
        ending.signal = ending.signal or signal.Signals(signum).name
        ending.set()

    for signum in ending_signals():
        asyncio.get_running_loop().add_signal_handler(signum, on_signal, signum)
    yield
    if received:
        raise Interrupted(f"ended by {ending.signal}; {ending.then}", 128 + received[0])
