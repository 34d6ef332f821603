"""All engines of this explorer as one: requests go to the one with the fewest running, updates to all."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trinity.data.experience import SamplingParams
from trinity.data.images import PlacedImage
from trinity.explorer.engine.engine import Engine
from trinity.explorer.types import Completion, EngineOptions, EngineUsage
from trinity.explorer.weights.load_history import LoadHistory
from trinity.runtime.metrics import Counter
from trinity.weights import Canary
from trinity.weights import canary as canaries

TOKENS = Counter("trinity_explorer_tokens_generated_total", "Tokens sampled, in complete responses")

_RATE_SECONDS = 30.0


class EnginePool:
    """Engines of one model, all with the same weights (apart from the moment of an update)."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self.loads = LoadHistory()
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
    def tokens_generated(self) -> int:
        return sum(engine.tokens_generated for engine in self.engines)

    def tokens_per_second(self) -> float:
        """Over the last 30 seconds."""
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - _RATE_SECONDS:
            self._recent.popleft()
        return sum(tokens for _, tokens in self._recent) / _RATE_SECONDS

    def usage(self) -> list[EngineUsage]:
        """Of each engine, as it reported about a second ago. An idle engine reports nothing."""
        pairs = zip(self.engines, self._running.values(), strict=True)
        return [engine.usage if running else EngineUsage() for engine, running in pairs]

    @contextlib.asynccontextmanager
    async def least_busy(self, sequences: int = 1) -> AsyncIterator[Engine]:
        """The engine with the fewest sequences running, which counts these among them until the context ends."""
        index = min(self._running, key=self._running.__getitem__)
        self._running[index] += sequences
        try:
            yield self.engines[index]
        finally:
            self._running[index] -= sequences

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> list[Completion]:
        """As Engine.generate, with spans of versions. Returns once all weights that took part are known to be good;
        raises WeightsWithdrawn if some are not."""
        await self.loads.usable()
        async with self.least_busy(sampling.n) as engine:
            completions = await engine.generate(prompt_token_ids, sampling, images)
        self._count(sum(len(c.token_ids) for c in completions))
        return [replace(c, version_spans=await self.loads.settle(c.version_spans)) for c in completions]

    async def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """As Engine.logprobs, by weights that are not known to be wrong; a load waits until it has ended."""
        while True:
            await self.loads.usable()
            async with self.least_busy() as engine, engine.no_load():
                if self.loads.is_usable:  # a load that failed meanwhile leaves the engine paused
                    return await engine.logprobs(token_ids)

    def count(self, engine: Engine, tokens: int) -> None:
        """Tokens of complete responses that were sampled past `generate`."""
        engine.tokens_generated += tokens
        self._count(tokens)

    def _count(self, tokens: int) -> None:
        TOKENS.inc(tokens)
        self._recent.append((time.monotonic(), tokens))

    async def load(self, version: int, update_info: dict[str, Any]) -> tuple[int, float]:
        """Load a version everywhere; returns the load's serial and the longest pause in seconds.

        If it fails anywhere, that engine is paused, the load is BAD, and only a full load makes it good again.
        """
        serial = self.loads.begin(version)
        loading = (engine.load(serial, update_info) for engine in self.engines)
        results = await asyncio.gather(*loading, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                self.loads.mark_bad(serial, f"could not be loaded: {result}")
                raise result
        return serial, max(result for result in results if not isinstance(result, BaseException))

    async def measure(self, canary: Canary) -> canaries.Measured:
        """The canary on every engine: the worst one's. Raises EngineFailed."""
        limit = min(engine.options.max_model_len for engine in self.engines) - 1
        return await canaries.measure(self.engines, canary, limit)

    async def enter_group(self, init_info: dict[str, Any], first_rank: int) -> None:
        """Let all engines enter a collective group: worker.InitInfo without its first rank, and the first one's."""
        entering = [
            engine.enter_group({**init_info, "first_rank": first_rank + index * engine.options.tensor_parallel_size})
            for index, engine in enumerate(self.engines)
        ]
        await asyncio.gather(*entering)

    async def check(self) -> None:
        await asyncio.gather(*(engine.check() for engine in self.engines))

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
