"""Adapters of several versions in one engine, loaded on demand. The least recently used one makes room for another.

    unknown -> loading -> checked by its canary -> held ... -> dropped

A version is named by a number, by which `source` gives its adapters.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from trinity.explorer.engine.engine import Engine, Using
from trinity.explorer.engine.pool import measure
from trinity.runtime.errors import DataLoss
from trinity.runtime.metrics import Counter
from trinity.weights.manifest import Canary

log = structlog.get_logger(__name__)

LOADS = Counter(
    "trinity_sampler_loads",
    "Adapters of tenants, and of older versions that play, that were loaded, by the verdict of their canary",
    ["verdict"],
)

# Gives a version's folder of peft, None for the base model, and its canary, if it has one. The folder lasts as long as
# the context.
Source = Callable[[int], contextlib.AbstractAsyncContextManager[tuple[Path | None, Canary | None]]]


@dataclass
class _Held:
    """A version that the engine has. `running`: its requests."""

    running: int = 0


class Versions:
    """The versions that an engine holds.

    A load waits only for room. While every version that is held is in use, the least recently used one takes no new
    requests, so that its requests end. It takes requests again if another version makes room first.
    """

    def __init__(self, engine: Engine, source: Source, most: int, base: int | None = 0) -> None:
        """most: adapters held at a time. base: the version that is the engine's own weights; None: no version is."""
        self.engine = engine
        self._source, self._most, self._base = source, most, base
        self._held: dict[int, _Held] = {}  # least recently used first
        self._ending: dict[int, _Held] = {}  # one at most
        self._taken = 0  # slots of versions that are held, ending or loading
        self._asked: defaultdict[int, int] = defaultdict(int)  # requests that have not begun, by version
        self._wrong: dict[int, str] = {}
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._waiting: list[int] = []  # versions that wait for room, in order
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def using(self, version: int) -> AsyncIterator[Using]:
        """The weights of a request that runs until the context ends.

        Raises the source's errors, and DataLoss for adapters whose canary failed.
        """
        if version == self._base:
            async with self.engine.using() as weights:
                yield weights
            return
        held = await self._begin(version)
        try:
            async with self.engine.using(str(version)) as weights:
                yield weights
        finally:
            held.running -= 1
            self._tell()

    async def _begin(self, version: int) -> _Held:
        """Counts a request of a version, once it is held."""
        self._asked[version] += 1
        try:
            while version not in self._held:
                if version in self._wrong:
                    raise DataLoss(self._wrong[version])
                load = self._loads.get(version)
                if load is None:
                    load = self._loads[version] = asyncio.create_task(self._load(version))
                await asyncio.shield(load)  # others wait for it, too
            held = self._held[version] = self._held.pop(version)
            held.running += 1
            return held
        finally:
            self._asked[version] -= 1
            if not self._asked[version]:
                del self._asked[version]
            self._tell()

    def _tell(self) -> None:
        """Lets all that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _load(self, version: int) -> None:
        try:
            async with self._source(version) as (folder, canary):
                if await self._take_room(version):
                    await self._load_one(version, folder, canary)
        finally:
            del self._loads[version]

    async def _take_room(self, version: int) -> bool:
        """Waits for room, in order. Returns False for a version that takes requests again."""
        self._waiting.append(version)
        try:
            while version not in self._held:
                if self._waiting[0] == version and await self._has_room():
                    self._taken += 1
                    return True
                await self._changed.wait()
            return False
        finally:
            self._waiting.remove(version)
            self._held = self._ending | self._held
            self._ending = {}
            self._tell()

    async def _has_room(self) -> bool:
        if self._taken < self._most:
            return True
        # Requests begin after the load that they asked for. Another load must not drop their version before.
        asked = self._asked.keys() & self._held.keys()
        for versions in (self._ending, self._held):
            unused = (one for one, held in versions.items() if not held.running and one not in asked)
            if (idle := next(unused, None)) is not None:
                del versions[idle]
                await self.engine.adapters.drop(str(idle))
                self._taken -= 1
                return True
        if self._held and not self._ending:
            oldest = next(iter(self._held))
            self._ending[oldest] = self._held.pop(oldest)
        return False

    async def _load_one(self, version: int, folder: Path | None, canary: Canary | None) -> None:
        adapters, name = self.engine.adapters, str(version)
        try:
            await adapters.load(name, folder, version)
            if canary is not None:
                await self._check(version, canary)
        except BaseException:
            self._taken -= 1
            if name in adapters.names:
                await adapters.drop(name)
            raise
        else:
            self._held[version] = _Held()
        finally:
            self._tell()

    async def _check(self, version: int, canary: Canary) -> None:
        """Raises DataLoss if the engine computes other log-probabilities than the trainer."""
        limit = self.engine.options.max_model_len - 1
        measured = await measure([partial(self.engine.logprobs, adapter=str(version))], canary, limit)
        sound = measured.within(canary, self.engine.options.precision)
        LOADS.labels("sound" if sound else "wrong").inc()
        log.info("sampler.adapters.loaded", position=version, sound=sound, mean_error=measured.mean_error)
        if not sound:
            self._wrong[version] = f"the engine computes other log-probabilities than the trainer: {measured}"
            raise DataLoss(self._wrong[version])
