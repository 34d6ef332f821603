"""What the parts of the buffer share about one run: who it is, what is LIVE, and a bell for every change."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trinity.config import Plan
from trinity.runtime.broker import Broker
from trinity.runtime.names import RunNames


class Bell:
    """Rung at every change of state; a waiter looks again at each ring."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()

    async def ring(self) -> None:
        async with self._condition:
            self._condition.notify_all()

    async def wait_for(self, holds: Callable[[], bool], timeout_seconds: float | None = None) -> bool:
        """Until `holds()`; False after the timeout."""
        try:
            async with asyncio.timeout(timeout_seconds), self._condition:
                await self._condition.wait_for(holds)
            return True
        except TimeoutError:
            return False


@dataclass
class RunContext:
    """One run in this process. `last_step` is where it ends; `live_step` -1 until weights are LIVE.

    `newest_live_step` never falls, as `live_step` does when a version is withdrawn. `log_is_full`: only a newer
    checkpoint would make room. `fed` counts training tasks. `wanted_step` is the newest step
    that the trainer asked for, `wanted_since` when it began to wait for it, in monotonic seconds.
    """

    broker: Broker
    names: RunNames
    plan: Plan
    last_step: int = 0
    live_step: int = -1
    newest_live_step: int = -1
    committed_step: int = 0
    fed: int = 0
    wanted_step: int = 0
    wanted_since: float = 0.0
    log_is_full: bool = False
    bell: Bell = field(default_factory=Bell)

    async def want(self, step: int, anew: bool = False) -> None:
        """The trainer waits for a step; `anew`: it has just begun to ask."""
        if step > self.wanted_step or (anew and step == self.wanted_step):
            self.wanted_step, self.wanted_since = step, time.monotonic()
            await self.bell.ring()

    @property
    def run(self) -> str:
        return self.names.run
