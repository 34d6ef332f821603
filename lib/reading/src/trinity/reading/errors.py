"""Errors that end a command with one sentence and an exit code, without a traceback."""

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
    """Returns the error of a service that demands an identity which this command lacks."""
    fix = (
        "start it as the user that started the run, with the run's own job folder; between machines set "
        "TRINITY_IDENTITY"
    )
    return RunError(f"the run does not accept this command: {reason}; {fix}")


def ending_well(action: Callable[[], int]) -> int:
    """Runs a command. Returns 2 for an unusable configuration, and 1 or the code of the RunError for other errors."""
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

    if isinstance(error, ConfigError):
        for problem in error.problems:
            print(visible(f"{error.source}: {problem}"), file=sys.stderr)
        return 2
    reason = first_of(error)
    if (text := expected_text(reason)) is None:
        return None
    print(f"trinity: {visible(text, layout=True)}", file=sys.stderr)
    return reason.code if isinstance(reason, RunError) else 1


def first_of(error: BaseException) -> BaseException:
    """The first error of a group, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def expected_text(error: BaseException) -> str | None:
    """The sentence of an error that a user can act on; None for any other, which keeps its traceback."""
    from trinity.runtime.errors import TrinityError

    if isinstance(error, (RunError, TrinityError)):
        return str(error)
    if isinstance(error, OSError) and error.strerror:  # as the system says it, of a file or a disk
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return None
