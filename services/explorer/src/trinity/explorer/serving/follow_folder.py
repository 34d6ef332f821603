"""Following a job folder, for mode serve without a live run: the engines serve the newest checkpoint with weights."""

import asyncio
from pathlib import Path

import structlog

from trinity.explorer.engine.pool import EnginePool
from trinity.runtime.errors import InvalidInput
from trinity.weights import manifest_of_folder
from trinity.weights.checkpoints import newest_model

log = structlog.get_logger(__name__)

_POLL_SECONDS = 2.0


class FolderFollower:
    """Keeps the engines at the newest checkpoint of a job folder. `version` is its step; 0 is the base model."""

    def __init__(self, folder: Path, pool: EnginePool) -> None:
        self._folder = folder
        self._pool = pool
        self._refused = -1
        self.version = 0

    async def run(self) -> None:
        while True:
            await self.load_newest()
            await asyncio.sleep(_POLL_SECONDS)

    async def load_newest(self) -> None:
        """Load the newest checkpoint unless it is served already; log an unreadable one once."""
        found = await asyncio.to_thread(newest_model, self._folder)
        if found is None or found[0] in (self.version, self._refused):
            return
        step, model = found
        try:
            manifest = await asyncio.to_thread(manifest_of_folder, "serve", step, model, checksums=False)
        except InvalidInput as error:
            self._refused = step
            log.warning("explorer.checkpoint.refused", step=step, reason=str(error))
            return
        files, tensors = manifest.load_arguments(model)
        serial, pause = await self._pool.load(step, {"files": files, "tensors": [list(tensor) for tensor in tensors]})
        self._pool.loads.trust(serial)
        self.version = step
        log.info("explorer.checkpoint.loaded", step=step, pause=round(pause, 4))
