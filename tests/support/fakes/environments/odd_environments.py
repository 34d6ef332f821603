"""Environments that do what the action says, in every kind of isolation. Importable by worker processes."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity.sdk import AsyncEnvironment, Description, Environment, InvalidInput, Observation


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Odd(Environment):
    """Returns the answer that the action names."""

    description = Description("odd", "for tests", 0, step_timeout_seconds=1.0, reset_timeout_seconds=10.0)

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        self.closed_file = task.get("closed_file")
        self.kept: list[bytes] = []
        if task.get("bad"):
            raise InvalidInput("task.bad", "is true")
        return Observation(f"{os.getpid()} {threading.get_ident()}", info={"seed": seed})

    def step(self, action: str) -> Observation:
        if action == "raise":
            raise ValueError("broken inside")
        if action == "exit":
            raise SystemExit(3)
        if action == "cancel":
            raise asyncio.CancelledError
        if action == "half":
            raise ValueError("half a pair: \ud83d")
        if action == "unreadable":
            raise Unreadable
        if action == "die":
            os._exit(7)
        if action == "hang":
            time.sleep(2.0 if self.isolation == "thread" else 600)
        if action == "spawn":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            return Observation(str(child.pid))
        if action == "eat":
            self.kept.append(os.urandom(1 << 20) * 400)
            time.sleep(600)
        return Observation(f"{os.getpid()} {threading.get_ident()}", reward=0.5, done=action == "done")

    def close(self) -> None:
        if self.closed_file:
            with Path(self.closed_file).open("a") as file:
                file.write("closed\n")
            raise asyncio.CancelledError


class OddInLoop(Odd):
    isolation = "none"


class OddInProcess(Odd):
    isolation = "process"
    processes = 2
    memory_limit_mib = 300


class Even(Odd):
    """Says the same wherever it runs."""

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        return replace(super().reset(task, args, seed), text="begin")

    def step(self, action: str) -> Observation:
        return replace(super().step(action), text=action)


class EvenInProcess(Even):
    isolation = "process"
    processes = 2


class OddHungry(OddInProcess):
    """Has time enough to eat."""

    description = Description("odd", "for tests", 0, step_timeout_seconds=60, reset_timeout_seconds=60)


class OddShared(OddInProcess):
    """Several episodes in one worker."""

    processes = 1
    episodes_per_process = 3


class OddCoroutine(AsyncEnvironment):
    description = Odd.description

    async def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        self.inner: Odd = Odd()
        return self.inner.reset(task, args, seed)

    async def step(self, action: str) -> Observation:
        if action == "hang":
            await asyncio.sleep(600)
        return self.inner.step(action)

    async def close(self) -> None:
        self.inner.close()


class EvenCoroutine(OddCoroutine):
    async def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        self.inner = Even()
        return self.inner.reset(task, args, seed)


class OddCoroutineInProcess(OddCoroutine):
    isolation = "process"
    processes = 1
