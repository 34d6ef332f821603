"""What ends a command: one clear sentence for the screen and an exit code, never a traceback."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable

from trinity.reading.render import visible


class RunError(Exception):
    """The command cannot continue. `code` is the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def not_accepted(reason: str) -> RunError:
    """A service demands an identity that this command does not have."""
    fix = (
        "start it as the user that started the run, with the run's own job folder; between machines set "
        "TRINITY_IDENTITY"
    )
    return RunError(f"the run does not accept this command: {reason}; {fix}")


def ending_well(action: Callable[[], int]) -> int:
    """2 for a configuration that cannot be used, 1 (or a RunError's own code) for a run that could not continue."""
    try:
        return action()
    except BrokenPipeError:  # the reader of a pipe has seen enough
        with contextlib.suppress(OSError, ValueError):  # else Python complains when it flushes at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, BaseExceptionGroup) as error:
        if (code := _tell(error)) is None:
            raise
        return code
    except KeyboardInterrupt:  # before anything was started, or in a command that starts nothing
        print("trinity: ended by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _tell(error: BaseException) -> int | None:
    """Prints an expected error and returns the exit code; returns None for an error that keeps its traceback."""
    from trinity.config import ConfigError  # imported late: a command that succeeds does not need them
    from trinity.runtime.errors import TrinityError

    if isinstance(error, ConfigError):
        for problem in error.problems:
            print(visible(f"{error.source}: {problem}"), file=sys.stderr)
        return 2
    reason = error
    while isinstance(reason, BaseExceptionGroup):
        reason = reason.exceptions[0]
    if isinstance(reason, (RunError, TrinityError)):
        text = str(reason)
    elif isinstance(reason, OSError) and reason.strerror:  # as the system says it, of a file or a disk
        text = f"{reason.filename}: {reason.strerror}" if reason.filename else reason.strerror
    else:
        return None
    print(f"trinity: {visible(text, layout=True)}", file=sys.stderr)
    return reason.code if isinstance(reason, RunError) else 1
