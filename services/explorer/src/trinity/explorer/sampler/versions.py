"""Adapters that tenants saved, loaded into one engine on demand. The least recently used one makes room for another.

    unknown -> loading -> checked by its canary -> held ... -> dropped

A version is named by the position of the command that saved it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import structlog

from trinity.explorer.engine.engine import Engine, Using
from trinity.runtime.errors import DataLoss
from trinity.runtime.metrics import Counter
from trinity.weights import canary as canaries
from trinity.weights.saved_adapters import canary_of, folder_of

log = structlog.get_logger(__name__)

LOADS = Counter(
    "trinity_sampler_loads", "Adapters of tenants that were loaded, by the verdict of their canary", ["verdict"]
)


class Versions:
    """The versions that an engine holds."""

    def __init__(self, engine: Engine, root: Path, most: int) -> None:
        """root: folder of the saved adapters. most: adapters held at a time."""
        self.engine = engine
        self._root, self._most = root, most
        self._held: dict[int, None] = {}  # least recently used first
        self._wrong: dict[int, str] = {}
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._loading = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def using(self, position: int) -> AsyncIterator[Using]:
        """The weights of a request that runs until the context ends; 0: the base model.

        Raises NotFound for adapters that are not saved, and DataLoss for those whose canary failed.
        """
        while position and position not in self._held:
            if position in self._wrong:
                raise DataLoss(self._wrong[position])
            load = self._loads.get(position)
            if load is None:
                load = self._loads[position] = asyncio.create_task(self._load(position))
            await asyncio.shield(load)  # others wait for it, too
        if position:
            self._held[position] = self._held.pop(position)
        async with self.engine.using(str(position) if position else "") as weights:
            yield weights

    async def _load(self, position: int) -> None:
        try:
            async with self._loading:
                await self._load_one(position)
        finally:
            del self._loads[position]

    async def _load_one(self, position: int) -> None:
        adapters, name, folder = self.engine.adapters, str(position), folder_of(self._root, position)
        canary = await asyncio.to_thread(canary_of, folder)
        if len(self._held) >= self._most:
            idle = (one for one in self._held if not adapters.is_used(str(one)))
            oldest = next(idle, next(iter(self._held)))
            del self._held[oldest]
            await adapters.drop(str(oldest))
        await adapters.load(name, folder)
        expected = np.concatenate([np.array(probe.logprobs, np.float32) for probe in canary.probes])
        found = [await self.engine.logprobs(probe.token_ids, adapter=name) for probe in canary.probes]
        measured = canaries.compare(expected, np.concatenate(found))
        sound = measured.within(canary, self.engine.options.precision)
        LOADS.labels("sound" if sound else "wrong").inc()
        log.info("sampler.adapters.loaded", position=position, sound=sound, mean_error=measured.mean_error)
        if not sound:
            await adapters.drop(name)
            self._wrong[position] = f"the engine computes other log-probabilities than the trainer: {measured}"
            raise DataLoss(self._wrong[position])
        self._held[position] = None
