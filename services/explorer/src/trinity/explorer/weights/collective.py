"""This explorer's member of the trainer's collective group: it enters epochs and reports when it can receive."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from trinity.explorer.types import EngineFailed
from trinity.weights import Manifest
from trinity.weights.collective import GroupBroken, Store
from trinity.weights.pointer import Epoch

log = structlog.get_logger(__name__)

# Enter a group with all engines: engine.worker.InitInfo without first_rank, and this explorer's first rank.
Enter = Callable[[dict[str, Any], int], Awaitable[None]]


class CollectiveMember:
    """Follows the epochs this explorer belongs to. Never raises: an explorer that is not ready loads from storage."""

    def __init__(self, explorer_id: str, enter: Enter, timeout_seconds: float) -> None:
        self._id = explorer_id
        self._enter = enter
        self._timeout = timeout_seconds
        self._number = 0
        self._store: Store | None = None
        self._entering: asyncio.Task[None] | None = None
        self._declining: set[asyncio.Task[Any]] = set()

    def epoch(self, epoch: Epoch | None) -> None:
        """The current epoch: leave the one before, and enter it in the background, if it is a new one."""
        number = epoch.number if epoch is not None else 0
        if number == self._number:
            return
        self._number, self._store = number, None
        before, self._entering = self._entering, None
        if before is not None:
            before.cancel()
        if epoch is not None:
            self._entering = asyncio.create_task(self._join(epoch, before))

    async def _join(self, epoch: Epoch, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            store = await asyncio.to_thread(Store.connect, epoch.store_address, epoch.store_secret, self._timeout)
            await asyncio.to_thread(store.say, f"here/{epoch.number}/{self._id}")
            if not await asyncio.to_thread(store.wait, f"go/{epoch.number}", self._timeout):
                raise GroupBroken("the trainer gave it up")
            first = next(member.first_rank for member in epoch.members if member.explorer_id == self._id)
            group = {
                "epoch": epoch.number,
                "backend": epoch.backend,
                "store_address": epoch.store_address,
                "store_secret": epoch.store_secret,
                "world_size": epoch.world_size,
                "timeout_seconds": self._timeout,
            }
            await self._enter(group, first)
            self._store = store
            log.info("explorer.epoch.entered", epoch=epoch.number, first_rank=first, world_size=epoch.world_size)
        except (GroupBroken, EngineFailed, StopIteration) as error:  # a dead engine is found by its health
            log.warning("explorer.epoch.missed", epoch=epoch.number, reason=str(error))

    def decline(self, manifest: Manifest) -> None:
        """Tell the group, in the background, not to wait for this explorer."""
        declining = asyncio.create_task(self.ready(manifest, willing=False))
        self._declining.add(declining)
        declining.add_done_callback(self._declining.discard)

    async def ready(self, manifest: Manifest, willing: bool = True) -> dict[str, Any] | None:
        """What to give to the engines at once, when all members are ready; None: load it another way."""
        offer = manifest.collective
        if offer is None or offer.epoch != self._number:
            return None
        if self._entering is not None:
            await asyncio.wait([self._entering], timeout=self._timeout)
        if self._store is None:
            return None
        store, version = self._store, manifest.version
        try:
            await asyncio.to_thread(store.say, f"ready/{offer.epoch}/{version}/{self._id}", willing)
            if not willing or not await asyncio.to_thread(store.wait, f"go/{offer.epoch}/{version}", 2 * self._timeout):
                return None
        except GroupBroken as error:
            log.warning("explorer.epoch.broken", epoch=offer.epoch, reason=str(error))
            if self._store is store:
                self._store = None
            return None
        tensors = [[t.name, t.dtype, list(t.shape), t.size_bytes] for t in manifest.tensors]
        return {"epoch": offer.epoch, "bucket_bytes": offer.bucket_bytes, "tensors": tensors}

    async def close(self) -> None:
        """Leave the epoch."""
        self._store = None
        open_calls = [*self._declining, *([self._entering] if self._entering is not None else [])]
        for call in open_calls:
            call.cancel()
        await asyncio.gather(*open_calls, return_exceptions=True)
        self._entering = None
