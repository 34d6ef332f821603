"""Engines that keep to a job folder: they load its newest checkpoint, of this run or of another."""

import asyncio
from pathlib import Path

import structlog

from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.types import EngineFailed
from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoint_manifest import verify_model
from trinity.weights.checkpoints import COMPLETE, checkpoint_folder, newest_model
from trinity.weights.manifest import manifest_of_folder

log = structlog.get_logger(__name__)

_POLL_SECONDS = 2.0


class FolderFollower:
    """Keeps the engines at the newest checkpoint of a job folder. `version`: its step; 0 for the base model."""

    def __init__(self, folder: Path, pool: EnginePool, *, unverified: bool = False) -> None:
        """`unverified`: also load files that are not in a checkpoint's manifest."""
        self._folder = folder
        self._unverified = unverified
        self._pool = pool
        self._seen: tuple[int, int] | None = None  # the checkpoint that is served or was refused
        self._first = asyncio.Event()
        self.version = 0

    async def run(self) -> None:
        while True:
            await self.load_newest()
            self._first.set()
            await asyncio.sleep(_POLL_SECONDS)

    async def first_loaded(self) -> None:
        """Wait until the first checkpoint is loaded, or none was found."""
        await self._first.wait()

    async def load_newest(self) -> None:
        """Load the newest checkpoint unless it is already served. A checkpoint that cannot be loaded is logged once."""
        found = await asyncio.to_thread(newest_model, self._folder)
        if found is None:
            return
        step, model = found
        checkpoint = checkpoint_folder(self._folder, step)
        seen = step, _saved_ns(checkpoint)
        if seen == self._seen:
            return
        try:
            if not self._unverified:
                await asyncio.to_thread(verify_model, model)
            manifest = await asyncio.to_thread(manifest_of_folder, "serve", step, model, checksums=False)
            files, tensors = manifest.load_arguments(model)
            info = {"files": files, "tensors": [list(tensor) for tensor in tensors]}
            serial, pause = await self._pool.load(step, info)
        except (InvalidInput, OSError, EngineFailed) as error:
            if not (checkpoint / COMPLETE).exists():  # removed meanwhile; a newer one repairs a load that broke off
                log.info("explorer.checkpoint.gone", folder=str(self._folder), step=step)
                return
            if not isinstance(error, InvalidInput):
                raise
            self._seen = seen
            log.warning("explorer.checkpoint.refused", folder=str(self._folder), step=step, reason=str(error))
            return
        self._pool.loads.trust(serial)
        self._seen, self.version = seen, step
        log.info("explorer.checkpoint.loaded", folder=str(self._folder), step=step, pause=round(pause, 4))


def _saved_ns(checkpoint: Path) -> int:
    """When it was completed, in nanoseconds: after a rollback the trainer saves a step again. 0: it is gone."""
    try:
        return (checkpoint / COMPLETE).stat().st_mtime_ns
    except OSError:
        return 0
