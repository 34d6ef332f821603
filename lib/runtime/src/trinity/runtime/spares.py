"""Spares: processes that have imported everything, and wait for the order to take another's place.

    spare = Spare(command, environment, start_new_session=True)     # in the parent, while all is well
    process = spare.begin(environment)                              # later: it goes on as that process

    spares.wait(load)                                               # first line of the program: loads and waits, if so

A spare reads its environment from a pipe, its standard input, and ends when its parent does.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trinity.runtime.process import die_with_parent

_VARIABLE = "TRINITY_SPARE"


class Spare:
    """A waiting process. Make it in the thread that its environment's `as_parent` means: it ends with that thread."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **arguments: Any) -> None:
        """arguments: those of `subprocess.Popen` for its output and session."""
        self._given = {**environment, _VARIABLE: "1"}
        self._process = subprocess.Popen(list(command), env=self._given, stdin=subprocess.PIPE, **arguments)

    def begin(self, environment: Mapping[str, str]) -> "subprocess.Popen[bytes] | None":
        """Lets it run in this environment. Returns None if it has died."""
        process, pipe = self._process, self._process.stdin
        assert pipe is not None
        changed = {name: value for name, value in environment.items() if self._given.get(name) != value}
        with contextlib.suppress(BrokenPipeError), pipe:
            pipe.write(json.dumps(changed).encode() + b"\n")
        return process if process.poll() is None else None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def wait(load: Callable[[], object]) -> None:
    """Loads and waits for the order to begin, if this process is a spare; returns at once otherwise."""
    if not os.environ.pop(_VARIABLE, ""):
        return
    die_with_parent()
    load()
    order = sys.stdin.buffer.readline()
    if not order:
        os._exit(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.environ.update(json.loads(order))
