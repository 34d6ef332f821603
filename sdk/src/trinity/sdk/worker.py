"""A worker process: plays episodes of one environment class, one call after the other.

trinity.sdk.workers starts it with one end of a socket pair. The first message names the class; each later message is a
ProviderCall and gets a ProviderReply, which for `close` has only the id. The first reply reports a class that cannot be
found.
"""

import asyncio
import contextlib
import ctypes
import importlib
import json
import runpy
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import grpc

from trinity.sdk import wire
from trinity.sdk.contract import Action, Call, Close, Failure, Reply, Reset
from trinity.sdk.environment import AsyncEnvironment
from trinity.sdk.errors import number_of, status_of, text_of
from trinity.sdk.frames import frame, read_frame
from trinity.sdk.players import Actor, finished

_PR_SET_PDEATHSIG = 1


def find_class(about: dict[str, Any]) -> Any:
    """Returns the class that the parent names, if need be from the parent's main script."""
    sys.path[:] = about["path"]
    if about["script"]:
        found: Any = runpy.run_path(about["script"], run_name="__trinity_worker__")
        first, *rest = about["name"].split(".")
        found = found[first]
    else:
        found, rest = importlib.import_module(about["module"]), about["name"].split(".")
    for part in rest:
        found = getattr(found, part)
    return found


class Stage:
    """The episodes of this process."""

    def __init__(self, kind: Any, run: Callable[[Any], Any]) -> None:
        self._kind = kind
        self._run = run
        self._open: dict[int, Actor] = {}

    def answer(self, call: Call) -> Reply:
        """Returns the reply. Raises only errors that end the process."""
        try:
            if isinstance(call.message, Close):
                self._close(call.id)
                return Reply(call.id, None)
            if isinstance(call.message, Reset):
                self._open[call.id] = Actor(self._kind)
            assert isinstance(call.message, (Reset, Action))
            return Reply(call.id, self._run(self._open[call.id].play(call.message)))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # the environment's own
            code, text = status_of(error)
            return Reply(call.id, Failure(number_of(code), text))

    def _close(self, identity: int) -> None:
        actor = self._open.pop(identity, None)
        if actor is not None:
            self._run(actor.close())


def main(descriptor: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # only Linux has prctl
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    pipe = socket.socket(fileno=descriptor)
    pipe.set_inheritable(False)  # child processes of the environment must not keep it open
    about = read_frame(pipe)
    if about is None:
        return
    with asyncio.Runner() as runner:
        try:
            kind = find_class(json.loads(about))
        except (Exception, SystemExit) as error:
            failure = Failure(number_of(grpc.StatusCode.INTERNAL), f"{type(error).__name__}: {text_of(error)}")
            pipe.sendall(frame(wire.encode_reply(Reply(0, failure))))
            raise
        stage = Stage(kind, runner.run if issubclass(kind, AsyncEnvironment) else finished)
        pipe.sendall(frame(wire.encode_reply(Reply(0, None))))
        while (data := read_frame(pipe)) is not None:
            pipe.sendall(frame(wire.encode_reply(stage.answer(wire.decode_call(data)))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
