"""All engines of this explorer: which one samples a request, and what all of them do together for the weights."""

import asyncio
import contextlib
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trinity.data.experience import SamplingParams
from trinity.data.images import PlacedImage
from trinity.explorer.engine.engine import Engine, start_engines
from trinity.explorer.engine.trial import POLICY, Trial
from trinity.explorer.types import Completion, EngineOptions, EngineUsage, Taught
from trinity.explorer.weights.load_history import LoadHistory
from trinity.runtime.metrics import Counter
from trinity.weights.manifest import Canary, Measured

TOKENS = Counter("trinity_explorer_tokens_generated_total", "Tokens sampled, in complete responses")

_RATE_SECONDS = 30.0
_BLOCK = 32  # tokens
_KEPT = 200_000  # blocks; some 30 MB
# An engine with more sequences than this many times its share, and a few, gets no further turns.
_SHARE, _FEW = 1.25, 4


class EnginePool:
    """All engines of this explorer, with the same weights except during an update.

    A conversation stays with its engine (`Homes`); other requests go to the least busy one.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self.loads = LoadHistory(self.engines[0].options.precision)
        self.trial: Trial | None = None
        self._homes = Homes(len(self.engines))
        self._recent: deque[tuple[float, int]] = deque()

    @classmethod
    async def start(cls, options: EngineOptions, devices: Sequence[str | None]) -> "EnginePool":
        """Start an engine on each of these devices (values of CUDA_VISIBLE_DEVICES), all at once."""
        return cls(await start_engines(options, devices))

    @property
    def tokens_generated(self) -> int:
        return sum(engine.tokens_generated for engine in self.engines)

    def tokens_per_second(self) -> float:
        """Tokens per second over the last 30 seconds."""
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - _RATE_SECONDS:
            self._recent.popleft()
        return sum(tokens for _, tokens in self._recent) / _RATE_SECONDS

    def usage(self) -> list[EngineUsage]:
        """Each engine's usage, about a second old. An idle engine reports nothing."""
        pairs = zip(self.engines, self._homes.running, strict=True)
        return [engine.usage if running else EngineUsage() for engine, running in pairs]

    @property
    def tries(self) -> bool:
        """True while calls are split between two versions."""
        return self.trial is not None and any(self.trial.is_on(engine.adapters) for engine in self.engines)

    def adapter_of_call(self, engine: Engine) -> str:
        """Returns the name of the adapter that samples a call at the endpoint."""
        return self.trial.choose(engine.adapters) if self.trial is not None else POLICY

    @contextlib.asynccontextmanager
    async def engine_for(self, tokens: Sequence[int], sequences: int = 1) -> AsyncIterator[Engine]:
        """The engine for a prompt. `sequences` count as its load until the context ends."""
        index = self._homes.enter(tokens, sequences)
        try:
            yield self.engines[index]
        finally:
            self._homes.leave(index, sequences)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> list[Completion]:
        """Sample on one engine, with spans of versions. Returns once all these versions are known to be
        good; raises WeightsWithdrawn if one is not."""
        await self.loads.usable()
        async with self.engine_for(prompt_token_ids, sampling.n) as engine:
            completions = await engine.generate(prompt_token_ids, sampling, images)
        self._count(sum(len(c.token_ids) for c in completions))
        return [replace(c, version_spans=await self.loads.settle(c.version_spans)) for c in completions]

    async def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Engine.logprobs by weights that are not known to be wrong. Loads wait for it."""
        async with self._between_loads() as engine:
            return await engine.logprobs(token_ids)

    async def teach(self, token_ids: Sequence[int], prompt_length: int, top: int) -> Taught:
        """Engine.teach by weights that are not known to be wrong. Loads wait for it."""
        async with self._between_loads() as engine:
            return await engine.teach(token_ids, prompt_length, top)

    @contextlib.asynccontextmanager
    async def _between_loads(self) -> AsyncIterator[Engine]:
        while True:
            await self.loads.usable()
            async with self.engine_for(()) as engine, engine.no_load():
                if self.loads.is_usable:  # a load that failed meanwhile leaves the engine paused
                    yield engine
                    return

    def count(self, engine: Engine, tokens: int) -> None:
        """Count tokens of complete responses that were not sampled by `generate`."""
        engine.tokens_generated += tokens
        self._count(tokens)

    def _count(self, tokens: int) -> None:
        TOKENS.inc(tokens)
        self._recent.append((time.monotonic(), tokens))

    async def load(self, version: int, update_info: dict[str, Any]) -> tuple[int, float]:
        """Load a version into all engines. Returns the load's serial and the longest pause in seconds.

        If one engine fails, it stays paused and the load is BAD. Only a full load repairs it.
        """
        serial = self.loads.begin(version)
        loading = (engine.load(serial, update_info) for engine in self.engines)
        results = await asyncio.gather(*loading, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                self.loads.mark_bad(serial, f"could not be loaded: {result}")
                raise result
        return serial, max(result for result in results if not isinstance(result, BaseException))

    async def measure(self, canary: Canary) -> Measured:
        """Compute the canary on all engines. Returns the worst result. Raises EngineFailed."""
        limit = min(engine.options.max_model_len for engine in self.engines) - 1
        return await measure([engine.logprobs for engine in self.engines], canary, limit)

    async def enter_group(self, init_info: dict[str, Any], first_rank: int) -> None:
        """Make all engines enter a collective group. `init_info`: worker.InitInfo without `first_rank`."""
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


class Homes:
    """Engines by the beginnings of prompts that they have seen, the latest of some millions of tokens.

    A turn's prompt begins with the prompt before it. Its engine still has the key-value blocks of that, and another
    engine would compute them again.
    """

    def __init__(self, engines: int) -> None:
        self.running = [0] * engines  # sequences of each engine
        self._engine_of: OrderedDict[int, int] = OrderedDict()

    def enter(self, tokens: Sequence[int], sequences: int) -> int:
        """Returns the engine for a prompt, and counts its sequences until `leave`.

        That is the engine with the longest known beginning if this is at least a third of the prompt, unless it is
        overloaded; else the least busy engine.
        """
        blocks = list(_blocks(tokens)) if len(self.running) > 1 else []
        chosen = min(range(len(self.running)), key=self.running.__getitem__)
        known = next((index for index in reversed(range(len(blocks))) if blocks[index] in self._engine_of), -1)
        if 3 * (known + 1) * _BLOCK >= len(tokens) > 0:
            home = self._engine_of[blocks[known]]
            share = (sum(self.running) + sequences) / len(self.running)
            chosen = home if self.running[home] + sequences <= _SHARE * share + _FEW else chosen
        for block in blocks:
            self._engine_of[block] = chosen
            self._engine_of.move_to_end(block)
        while len(self._engine_of) > _KEPT:
            self._engine_of.popitem(last=False)
        self.running[chosen] += sequences
        return chosen

    def leave(self, engine: int, sequences: int) -> None:
        self.running[engine] -= sequences


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """Yields a hash of each beginning of whole blocks."""
    data, size, before = np.asarray(tokens, np.int32).tobytes(), 4 * _BLOCK, 0
    for end in range(size, len(data) + 1, size):
        before = hash((before, data[end - size : end]))
        yield before


def compare(expected: np.ndarray, computed: np.ndarray) -> Measured:
    """Compares two float32 arrays [P], P > 0.

    If a computed value is not finite, the mean is NaN and that value counts as the farthest.
    """
    errors = np.abs(expected.astype(np.float64) - computed.astype(np.float64))
    worst = int(np.argmax(np.where(np.isfinite(errors), errors, np.inf)))
    finite = bool(np.isfinite(errors).all())
    return Measured(
        float(errors.mean()) if finite else math.nan,
        float(errors[worst]) if finite else math.inf,
        float(expected[worst]),
        float(computed[worst]),
    )


async def measure(engines: Sequence[Callable[..., Awaitable[np.ndarray]]], canary: Canary, max_tokens: int) -> Measured:
    """Returns the worst result of the canary over all engines, given by Engine.logprobs. Raises EngineFailed.

    Probes are cut to `max_tokens`. Longer probes with images cannot be cut and are left out.
    """
    probes = [probe for probe in canary.probes if not probe.images or len(probe.token_ids) <= max_tokens]
    wanted = np.concatenate([np.array(probe.logprobs[: max_tokens - 1], np.float32) for probe in probes])

    async def one(logprobs: Callable[..., Awaitable[np.ndarray]]) -> Measured:
        found = await asyncio.gather(*(logprobs(probe.token_ids[:max_tokens], probe.images) for probe in probes))
        return compare(wanted, np.concatenate(found))

    def distance(measured: Measured) -> float:
        if math.isnan(measured.mean_error):
            return math.inf
        return max(measured.mean_error / canary.mean_tolerance, measured.max_error / canary.max_tolerance)

    return max(await asyncio.gather(*(one(logprobs) for logprobs in engines)), key=distance)
