"""Isolation "process": worker processes, which are killed when a call hangs or memory runs over, and started again.

A worker plays one call at a time, so that no call uses another's time. A killed worker ends the episodes it held. Idle
workers stay for the next episodes. A worker ends with this process, even if this process is killed.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from trinity.sdk import wire
from trinity.sdk.contract import Answer, Call, Close, Failure, Reply
from trinity.sdk.environment import EnvironmentClass
from trinity.sdk.errors import Broken, Full, TimedOut, failed
from trinity.sdk.frames import frame
from trinity.sdk.memory import memory_watch
from trinity.sdk.players import Message, Release, too_slow

log = logging.getLogger(__name__)

# Time to start an interpreter and import the environment.
WORKER_START_SECONDS = 60.0
_CLOSE_SECONDS = 10.0


class Workers:
    """The workers of one class. A call waits up to `wait_seconds` while its worker plays other episodes."""

    def __init__(self, kind: EnvironmentClass, processes: int, wait_seconds: float) -> None:
        self._kind = kind
        self._wait_seconds = wait_seconds
        self._processes = processes
        self._workers: list[Worker] = []

    def player(self, release: Release) -> "WorkerPlayer":
        """Returns a player in the least loaded worker, or in a new one if all have load. Raises Full."""
        self._workers = [worker for worker in self._workers if worker.fit()]
        available = [worker for worker in self._workers if worker.open < self._kind.episodes_per_process]
        worker = min(available, key=lambda one: one.load, default=None)
        if (worker is None or worker.load) and len(self._workers) < self._processes:
            worker = Worker(self._kind)
            self._workers.append(worker)
        if worker is None:
            raise Full(f"all {self._processes} workers of {self._kind.description.name} are busy; try again later")
        return WorkerPlayer(worker, release, self._wait_seconds)

    async def close(self) -> None:
        for worker in self._workers:
            worker.kill("the service ends")
        self._workers = []


class Worker:
    """One worker process. It lives from its first call until it exits or is killed."""

    def __init__(self, kind: EnvironmentClass) -> None:
        self._kind = kind
        self.open = 0  # open episodes
        self.dead = ""
        self._calls = 0
        self._ids = 0
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._unwatch: Callable[[], None] = lambda: None

    @property
    def load(self) -> int:
        """Returns open episodes plus running and waiting calls. An episode that waits for the policy uses no time."""
        return self.open + self._calls

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def fit(self) -> bool:
        """Returns True if the worker may take episodes: it is alive, or not started yet."""
        if self._process is not None and self._process.poll() is not None:
            self.kill("its worker process died")
        return not self.dead

    async def call(self, call: Call, seconds: float, wait_seconds: float | None = None) -> Reply:
        """Returns the reply. `seconds` begin with this call's turn.

        Raises TimeoutError and Broken, after which the worker is dead; TimedOut if its turn takes over `wait_seconds`.
        """
        self._calls += 1
        try:
            await self._await_turn(wait_seconds)
            try:
                if self._process is None and not self.dead:
                    await self._start()
                return await self._exchange(wire.encode_call(call), seconds)
            finally:
                self._turn.release()
        finally:
            self._calls -= 1

    async def _await_turn(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._turn.acquire()
        except TimeoutError:
            others = self._calls - 1
            raise TimedOut(
                f"it waited longer than {seconds:g} s for its turn: its worker process plays one call at a time, "
                f"and has {others} of other episodes; lower episodes_per_process ({self._kind.episodes_per_process})"
            ) from None

    async def _exchange(self, data: bytes, seconds: float) -> Reply:
        if self.dead:
            raise Broken(self.dead)
        assert self._reader is not None and self._writer is not None
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(frame(data))
                await self._writer.drain()
                size = int.from_bytes(await self._reader.readexactly(4), "big")
                return wire.decode_reply(await self._reader.readexactly(size))
        except TimeoutError:
            self.kill("its worker process was killed: an episode was over its time limit")
            raise
        except (EOFError, OSError):
            self.kill("its worker process died")
            raise Broken(self.dead) from None

    async def _start(self) -> None:
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
                [sys.executable, "-m", "trinity.sdk.worker", str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # killed together with its child processes
            )
        self._reader, self._writer = await asyncio.open_connection(sock=here)
        self._watch_memory(self._process.pid)
        try:
            reply = await self._exchange(json.dumps(_reference(self._kind)).encode(), WORKER_START_SECONDS)
        except TimeoutError:
            raise Broken(f"its worker process did not start in {WORKER_START_SECONDS:g} s") from None
        if isinstance(reply.result, Failure):
            self.kill(f"its worker process cannot load {self._kind.__qualname__}: {reply.result.message}")
            raise Broken(self.dead)

    def _watch_memory(self, pid: int) -> None:
        limit = self._kind.memory_limit_mib
        if limit is not None:
            watch = memory_watch()
            over = partial(self.kill, f"its worker process was killed: it used more than {limit} MiB")
            watch.add(pid, limit, self._turn.locked, over)
            self._unwatch = partial(watch.remove, pid)

    def kill(self, reason: str) -> None:
        """Ends the process and everything it started. The first reason stays."""
        if self.dead:
            return
        self.dead = reason
        self._unwatch()
        if self._writer is not None:
            self._writer.close()
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if code != -signal.SIGKILL:
            self.dead = f"{reason} (exit code {code})"
        log.info("worker of %s ended: %s", self._kind.description.name, self.dead)


class WorkerPlayer:
    """One episode in a worker. The time of a call includes the wait for its turn."""

    def __init__(self, worker: Worker, release: Release, wait_seconds: float) -> None:
        self._worker = worker
        self._wait_seconds = wait_seconds
        self._release = release
        self._id = worker.new_id()
        self._begun = False
        self._running: asyncio.Task[Reply] | None = None
        worker.open += 1

    async def play(self, message: Message, seconds: float) -> Answer:
        call = Call(self._id, message)
        self._begun = True
        seconds -= self._wait_seconds
        # A client that disconnects must not leave half a message in the pipe: the call runs to its end.
        self._running = asyncio.create_task(self._worker.call(call, seconds, self._wait_seconds))
        try:
            reply = await asyncio.shield(self._running)
        except TimeoutError:
            raise too_slow(message, seconds) from None
        if isinstance(reply.result, Failure):
            raise failed(reply.result.code, reply.result.message)
        assert isinstance(reply.result, Answer)
        return reply.result

    async def close(self) -> None:
        try:
            if self._running is not None:
                await asyncio.wait([self._running])
            if self._begun and not self._worker.dead:
                with contextlib.suppress(TimeoutError, Broken):
                    # Its turn comes: each of the few calls before it has its own limit.
                    reply = await self._worker.call(Call(self._id, Close()), _CLOSE_SECONDS)
                    if isinstance(reply.result, Failure):
                        log.error("close of %s failed: %s", self._id, reply.result.message)
        finally:
            if self._running is not None and self._running.done() and not self._running.cancelled():
                self._running.exception()  # raised already
            self._worker.open -= 1
            self._release()


def _reference(kind: EnvironmentClass) -> dict[str, Any]:
    """Makes the message by which a worker finds the class."""
    script, module = "", kind.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        if spec is not None:
            module = spec.name
        else:
            script = os.path.abspath(str(main.__file__))
    return {"module": module, "script": script, "name": kind.__qualname__, "path": [os.getcwd(), *sys.path]}
