"""All engines of this explorer as one: requests go to the one with the fewest running, updates to all."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

from trinity.explorer.engine.engine import Engine
from trinity.explorer.engine.types import Completion, EngineOptions
from trinity.runtime.experience import SamplingParams

_RATE_SECONDS = 30.0


class EnginePool:
    """Engines of one model, all at the same version (apart from the moment of an update)."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self._running = dict.fromkeys(range(len(self.engines)), 0)
        self._recent: deque[tuple[float, int]] = deque()

    @classmethod
    async def start(cls, options: EngineOptions, count: int, devices: Sequence[str | None]) -> "EnginePool":
        """Start the engines one after the other: each takes its devices from the environment of its start."""
        engines = []
        try:
            for index in range(count):
                engines.append(await Engine.start(options, devices[index] if devices else None))
        except BaseException:
            for engine in engines:
                engine.close()
            raise
        return cls(engines)

    @property
    def version(self) -> int:
        """The oldest version any engine serves."""
        return min(engine.version for engine in self.engines)

    @property
    def tokens_generated(self) -> int:
        return sum(engine.tokens_generated for engine in self.engines)

    def tokens_per_second(self) -> float:
        """Over the last 30 seconds."""
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - _RATE_SECONDS:
            self._recent.popleft()
        return sum(tokens for _, tokens in self._recent) / _RATE_SECONDS

    @contextlib.asynccontextmanager
    async def least_busy(self, sequences: int = 1) -> AsyncIterator[Engine]:
        """The engine with the fewest sequences running, which counts these among them until the context ends."""
        index = min(self._running, key=self._running.__getitem__)
        self._running[index] += sequences
        try:
            yield self.engines[index]
        finally:
            self._running[index] -= sequences

    async def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> list[Completion]:
        async with self.least_busy(sampling.n) as engine:
            completions = await engine.generate(prompt_token_ids, sampling)
        self._recent.append((time.monotonic(), sum(len(c.token_ids) for c in completions)))
        return completions

    async def load(self, version: int, files: Sequence[str], tensors: Sequence[tuple[str, int]]) -> float:
        """Load a version everywhere; returns the longest pause in seconds."""
        return max(await asyncio.gather(*(engine.load(version, files, tensors) for engine in self.engines)))

    async def check(self) -> None:
        await asyncio.gather(*(engine.check() for engine in self.engines))

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
