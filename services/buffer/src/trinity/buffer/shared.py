"""What the parts of the buffer share about one run: who it is, what is LIVE, and a bell for every change."""

import asyncio
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
    """One run in this process. `last_step` is where it ends; `live_step` -1 until weights are LIVE."""

    broker: Broker
    names: RunNames
    plan: Plan
    last_step: int = 0
    live_step: int = -1
    committed_step: int = 0
    bell: Bell = field(default_factory=Bell)

    @property
    def run(self) -> str:
        return self.names.run
