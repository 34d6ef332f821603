"""A walk with random winds, which no two episodes have alike, and which can be saved and restored."""

import asyncio
import json
import os
import random
from typing import Any, ClassVar

from trinity.sdk import AsyncEnvironment, Description, Environment, Observation


class Windy(Environment):
    """Walk to the right. Each step reports the drawn wind; `calls` has the calls of all objects."""

    description = Description("corridor", "Windy.", 20, step_timeout_seconds=3.0, snapshots=True)
    isolation = "none"
    calls: ClassVar[list[str]] = []

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        self.calls.append("reset")
        self.length, self.at, self.winds = task.get("length", 4), 0, random.Random(os.urandom(8))
        return Observation(f"Wind {self.winds.randrange(10**9)}.")

    def step(self, action: str) -> Observation:
        self.calls.append("step")
        self.at += 1
        won = self.at >= self.length
        text = f"At {self.at}. Wind {self.winds.randrange(10**9)}."
        return Observation(text, 0.25, won, {"wind": self.winds.random()}, {"steps": float(self.at)})

    def snapshot(self) -> bytes:
        return json.dumps([self.length, self.at, self.winds.getstate()]).encode()

    def restore(self, state: bytes) -> None:
        self.calls.append("restore")
        self.length, self.at, (version, drawn, rest) = json.loads(state)
        self.winds = random.Random()
        self.winds.setstate((version, tuple(drawn), rest))


class WindyInCoroutines(AsyncEnvironment):
    description = Windy.description

    def __init__(self) -> None:
        self._windy = Windy()

    async def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        return self._windy.reset(task, args, seed)

    async def step(self, action: str) -> Observation:
        await asyncio.sleep(0)
        return self._windy.step(action)

    async def snapshot(self) -> bytes:
        await asyncio.sleep(0)
        return self._windy.snapshot()

    async def restore(self, state: bytes) -> None:
        await asyncio.sleep(0)
        self._windy.restore(state)


class WindyInThread(Windy):
    isolation = "thread"


class WindyInProcess(Windy):
    isolation = "process"
    processes = 2
    episodes_per_process = 10
