"""Adapters of several versions in one engine, loaded on demand. The least recently used one makes room for another.

    unknown -> loading -> checked by its canary -> held ... -> dropped

A version is named by a number: of a tenant's saved adapters, or of the run's weights.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import structlog

from trinity.explorer.engine.engine import Engine, Using
from trinity.runtime.errors import DataLoss
from trinity.runtime.metrics import Counter
from trinity.weights import Canary
from trinity.weights import canary as canaries
from trinity.weights.saved_adapters import canary_of, folder_of

log = structlog.get_logger(__name__)

LOADS = Counter(
    "trinity_sampler_loads",
    "Adapters of tenants, and of older versions that play, that were loaded, by the verdict of their canary",
    ["verdict"],
)

# Gives a version's folder of peft, None for the base model, and its canary, if it has one. The folder lasts as long as
# the context.
Source = Callable[[int], contextlib.AbstractAsyncContextManager[tuple[Path | None, Canary | None]]]


def saved_in(root: Path) -> Source:
    """Adapters that tenants saved. Raises NotFound, DataLoss."""

    @contextlib.asynccontextmanager
    async def source(position: int) -> AsyncIterator[tuple[Path, Canary]]:
        folder = folder_of(root, position)
        yield folder, await asyncio.to_thread(canary_of, folder)

    return source


class Versions:
    """The versions that an engine holds."""

    def __init__(self, engine: Engine, source: Source, most: int, base: int | None = 0) -> None:
        """most: adapters held at a time. base: the version that is the engine's own weights; None: no version is."""
        self.engine = engine
        self._source, self._most, self._base = source, most, base
        self._held: dict[int, None] = {}  # least recently used first
        self._wrong: dict[int, str] = {}
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._loading = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def using(self, version: int) -> AsyncIterator[Using]:
        """The weights of a request that runs until the context ends.

        Raises the source's errors, and DataLoss for adapters whose canary failed.
        """
        if version == self._base:
            async with self.engine.using() as weights:
                yield weights
            return
        while version not in self._held:
            if version in self._wrong:
                raise DataLoss(self._wrong[version])
            load = self._loads.get(version)
            if load is None:
                load = self._loads[version] = asyncio.create_task(self._load(version))
            await asyncio.shield(load)  # others wait for it, too
        self._held[version] = self._held.pop(version)
        async with self.engine.using(str(version)) as weights:
            yield weights

    async def _load(self, version: int) -> None:
        try:
            async with self._loading:
                await self._load_one(version)
        finally:
            del self._loads[version]

    async def _load_one(self, version: int) -> None:
        adapters, name = self.engine.adapters, str(version)
        async with self._source(version) as (folder, canary):
            if len(self._held) >= self._most:
                idle = (one for one in self._held if not adapters.is_used(str(one)))
                oldest = next(idle, next(iter(self._held)))
                del self._held[oldest]
                await adapters.drop(str(oldest))
            await adapters.load(name, folder, version)
        if canary is not None:
            await self._check(version, canary)
        self._held[version] = None

    async def _check(self, version: int, canary: Canary) -> None:
        """Drop the adapters and raise DataLoss if the engine computes other log-probabilities than the trainer."""
        limit = self.engine.options.max_model_len - 1
        measured = await canaries.measure([_Named(self.engine, str(version))], canary, limit)
        sound = measured.within(canary, self.engine.options.precision)
        LOADS.labels("sound" if sound else "wrong").inc()
        log.info("sampler.adapters.loaded", position=version, sound=sound, mean_error=measured.mean_error)
        if not sound:
            await self.engine.adapters.drop(str(version))
            self._wrong[version] = f"the engine computes other log-probabilities than the trainer: {measured}"
            raise DataLoss(self._wrong[version])


class _Named:
    """An engine's adapter, for its canary."""

    def __init__(self, engine: Engine, adapter: str) -> None:
        self._engine, self._adapter = engine, adapter

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[bytes] = ()) -> np.ndarray:
        return await self._engine.logprobs(token_ids, images, self._adapter)
