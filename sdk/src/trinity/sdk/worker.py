"""A worker process: plays episodes of one environment class, one call after the other.

Started by trinity.sdk.workers with one end of a socket pair. The first message names the class; each further one is a
ProviderCall and is answered by a ProviderReply, `close` by one that has only the id. A class that cannot be found is
told in the first reply.
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
from trinity.sdk.errors import number_of, status_of
from trinity.sdk.frames import frame, read_frame
from trinity.sdk.players import Actor, finished

_PR_SET_PDEATHSIG = 1


def find_class(about: dict[str, Any]) -> Any:
    """The class that the parent names; one of the parent's main script is found by the script's path."""
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
        """Never raises, except what ends the process."""
        try:
            if isinstance(call.message, Close):
                self._close(call.id)
                return Reply(call.id, None)
            if isinstance(call.message, Reset):
                self._open[call.id] = Actor(self._kind)
            assert isinstance(call.message, (Reset, Action))
            return Reply(call.id, self._run(self._open[call.id].play(call.message)))
        except (Exception, SystemExit) as error:
            code, text = status_of(error)
            return Reply(call.id, Failure(number_of(code), text))

    def _close(self, identity: int) -> None:
        actor = self._open.pop(identity, None)
        if actor is not None:
            self._run(actor.close())


def main(descriptor: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux alone can do that
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    pipe = socket.socket(fileno=descriptor)
    pipe.set_inheritable(False)  # a process of the environment's own must not keep it open
    about = read_frame(pipe)
    if about is None:
        return
    with asyncio.Runner() as runner:
        try:
            kind = find_class(json.loads(about))
        except (Exception, SystemExit) as error:
            failure = Failure(number_of(grpc.StatusCode.INTERNAL), f"{type(error).__name__}: {error}")
            pipe.sendall(frame(wire.encode_reply(Reply(0, failure))))
            raise
        stage = Stage(kind, runner.run if issubclass(kind, AsyncEnvironment) else finished)
        pipe.sendall(frame(wire.encode_reply(Reply(0, None))))
        while (data := read_frame(pipe)) is not None:
            pipe.sendall(frame(wire.encode_reply(stage.answer(wire.decode_call(data)))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
