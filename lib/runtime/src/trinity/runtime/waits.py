"""Phases and waits of a process. The log has them, and from there the screen of `trinity run`.

phase("loads vLLM")
with waiting("the sync service at 10.0.0.7:50051", limit_seconds=600):
    ...
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import structlog

log = structlog.get_logger(__name__)

PHASE, WAITS, WENT_ON = "service.phase.began", "service.wait.began", "service.wait.ended"

# A shorter wait is not worth a line. The screen shows a longer one within 15 seconds.
_TELL_SECONDS = 8.0
# After this time at its start a service gives up waiting for another one. Loading a large model takes minutes.
START_SECONDS = 1800.0


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

    The caller ends the wait at its limit. `say` gets the text in another thread, in place of the log.
    """
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
