"""Phases and waits of a process. The log has them, and from there the screen of `trinity run`.

phase("loads vLLM")
with waiting("the sync service at 10.0.0.7:50051", limit_seconds=600):
    ...
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import structlog

from trinity.runtime.errors import Unavailable

log = structlog.get_logger(__name__)

PHASE, WAITS, WENT_ON = "service.phase.began", "service.wait.began", "service.wait.ended"

# A shorter wait is not worth a line. The screen shows a longer one within 15 seconds.
_TELL_SECONDS = 8.0
# After this time a service gives up waiting for another one. Loading a large model takes minutes.
START_SECONDS = 1800.0

_screen: Callable[[str], None] | None = None


@contextlib.contextmanager
def on_screen(say: Callable[[str], None]) -> Iterator[None]:
    """Says the waits of a command by `say` instead of the log."""
    global _screen
    before, _screen = _screen, say
    try:
        yield
    finally:
        _screen = before


def phase(text: str) -> None:
    """Says what this process does from now on, until it serves or says something else."""
    log.info(PHASE, phase=text)


def text_of(whom: str, why: str = "", limit_seconds: float | None = None) -> str:
    limit = f"; gives up after {limit_seconds:g} s" if limit_seconds is not None else ""
    return f"waits for {whom}{f' ({why})' if why else ''}{limit}"


@contextlib.contextmanager
def waiting(
    whom: str,
    why: str | Callable[[], str] = "",
    *,
    limit_seconds: float | None = None,
    say: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Says whom this process waits for, and why, if the block takes more than a few seconds.

    The caller ends the wait at its limit. `say`, or that of `on_screen`, gets the text in another thread, not the log.
    """
    say = say or _screen
    told = threading.Event()

    def tell() -> None:
        told.set()
        reason = why if isinstance(why, str) else why()
        if say is not None:
            say(text_of(whom, reason, limit_seconds))
        else:
            log.info(WAITS, whom=whom, reason=reason, limit_seconds=limit_seconds)

    timer = threading.Timer(_TELL_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if told.is_set() and say is None:
            log.info(WENT_ON, whom=whom)


class Absence:
    """A service that is away in the middle of a run: lost -> lost -> ... -> found. Says so as `waiting` does."""

    def __init__(self, whom: str, limit_seconds: float = START_SECONDS) -> None:
        self._whom, self._limit_seconds = whom, limit_seconds
        self._said = contextlib.ExitStack()
        self._since: float | None = None
        self._why = ""

    def lost(self, why: str) -> None:
        """Notes a failed call. Raises Unavailable once the service has been away for the limit."""
        self._why = why
        if self._since is None:
            self._since = time.monotonic()
            self._said.enter_context(waiting(self._whom, lambda: self._why, limit_seconds=self._limit_seconds))
        elif time.monotonic() - self._since > self._limit_seconds:
            self.found()
            raise Unavailable(f"{self._whom} was away for {self._limit_seconds:g} s: {why}")

    def found(self) -> None:
        self._since = None
        self._said.close()
