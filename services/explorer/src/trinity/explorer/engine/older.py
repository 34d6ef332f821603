"""Older versions of the policy, which play seats of games as frozen opponents.

Engines hold the adapters of several versions at once. A version samples only after it has passed its canary.
"""

import asyncio
import contextlib
import tempfile
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from trinity.config.schema.explorer import OlderVersionsConfig
from trinity.data.experience import SamplingParams
from trinity.data.images import PlacedImage
from trinity.explorer.engine.adapters import lay_out
from trinity.explorer.engine.engine import Engine
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.engine.versions import Versions
from trinity.explorer.types import Completion
from trinity.explorer.weights.loader import fetch_seconds, run_in_daemon_thread
from trinity.runtime.errors import Unavailable
from trinity.weights.client import Version
from trinity.weights.manifest import Canary, Manifest
from trinity.weights.wire import VersionState

_PLAYED = (VersionState.VERIFIED, VersionState.LIVE, VersionState.RETIRED)

# Returns a manifest's adapters as loader.fetch_adapters does. Blocks.
Fetch = Callable[[Manifest], tuple[dict[str, Any], str]]


class OlderVersions:
    """The older versions that this explorer samples from."""

    def __init__(
        self,
        pool: EnginePool,
        find: Callable[[int], Awaitable[Version | None]],
        fetch: Fetch,
        served: Callable[[], int],
        config: OlderVersionsConfig,
    ) -> None:
        """find: the sync service's record of a version, None without one; raises Unavailable if it does not answer.
        served: the step of the newest weights here.
        """
        self._pool, self._find, self._fetch, self._served, self._config = pool, find, fetch, served, config
        self._held: dict[Engine, Versions] = {
            engine: Versions(engine, self._adapters, config.keep, base=None) for engine in pool.engines
        }

    async def choose(self, key: str) -> int:
        """The version that plays against the served one, the same for equal keys until the served one changes.

        Raises Unavailable if none can play now.
        """
        known = self._config.before(self._served())
        first = zlib.crc32(key.encode()) % len(known)
        for version in (*known[first:], *known[:first]):
            found = await self._find(version)
            if found is not None and found.state in _PLAYED and _has_files(found):
                return version
        raise Unavailable(f"none of the older versions {', '.join(map(str, known))} can play: withdrawn or deleted")

    async def generate(
        self, version: int, prompt: Sequence[int], sampling: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> list[Completion]:
        """Sample by an older version, as EnginePool.generate does. Spans name the version.

        Raises also Unavailable and InvalidInput if its adapters cannot be fetched, DataLoss if its canary fails.
        """
        async with (
            self._pool.engine_for(prompt, sampling.n) as engine,
            self._held[engine].using(version),  # not dropped meanwhile
        ):
            return await engine.generate(prompt, sampling, images, str(version))

    @contextlib.asynccontextmanager
    async def _adapters(self, version: int) -> AsyncIterator[tuple[Path | None, Canary | None]]:
        found = await self._find(version)
        if found is None or not _has_files(found):
            raise Unavailable(f"the files of version {version} are gone")
        manifest = found.manifest
        told, _ = await run_in_daemon_thread(fetch_seconds(manifest), self._fetch, manifest)
        if not told["files"]:
            yield None, manifest.canary
            return
        with tempfile.TemporaryDirectory(prefix="trinity-adapter-") as made:
            await asyncio.to_thread(lay_out, Path(made), told["lora"], [Path(file) for file in told["files"]])
            yield Path(made), manifest.canary


def _has_files(version: Version) -> bool:
    """Tells if the weights of a version can be loaded. The base model needs no files."""
    return not version.files_gone and (version.version == 0 or bool(version.manifest.files))
