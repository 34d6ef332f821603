"""An older version LIVE again, and everything newer withdrawn: one compare-and-set of the pointer.

The record of the rollback lies in the pointer itself, and that a version is withdrawn follows from it, so there is no
moment at which half of it has happened. Before it, the version is marked so that its files are kept.
"""

import time
from dataclasses import replace

import structlog

from trinity.runtime.errors import Conflict
from trinity.sync.store.manifests import Manifests
from trinity.sync.store.records import Record
from trinity.sync.store.state import RunState, judge
from trinity.weights import FolderOffer, VersionState
from trinity.weights.pointer import MOST_ROLLBACKS, Live, Rollback

log = structlog.get_logger(__name__)


def next_number(live: Live) -> int:
    return live.rollback.number + 1 if live.rollback else 1


def rolled_back(live: Live, record: Record, *, keep_experience: bool, reason: str) -> Live:
    """The pointer after a rollback. Ranges that the new one covers are dropped from `withdrawn`."""
    rollback = Rollback(
        next_number(live), record.version, live.newest_version, live.newest_step, keep_experience, reason, time.time()
    )
    kept = tuple(span for span in live.withdrawn if span[0] < record.version)
    return replace(
        live,
        version=record.version,
        step=record.step,
        gate_step=max(live.gate_step, live.newest_step),
        rollbacks=(*live.rollbacks, rollback)[-MOST_ROLLBACKS:],
        withdrawn=(*kept, (record.version, live.newest_version)),
    )


class Rollbacks:
    """Rollbacks of one run."""

    def __init__(self, state: RunState, manifests: Manifests) -> None:
        self._state = state
        self._manifests = manifests

    async def to(self, version: int, *, keep_experience: bool, reason: str) -> Rollback | None:
        """Make an older version LIVE again. Idempotent; None if it is LIVE without any rollback.

        NotFound for a version that does not exist; Conflict for one that was never LIVE, was withdrawn, is newer than
        the LIVE one, or whose files are gone.
        """
        live = await self._state.pointer()
        while version != live.version:
            self._check(await self._state.record(version), live)
            await self._check_files(version)
            record = await self._reserve(version, live)
            live = await self._move(record, keep_experience=keep_experience, reason=reason)
        return live.rollback if live.rollback and live.rollback.version == version else None

    def _check(self, record: Record, live: Live) -> None:
        version, judged = record.version, judge(record, live)
        if judged.state is VersionState.REJECTED:
            raise Conflict(f"version: {version} is REJECTED ({judged.reason}); roll back to one that was LIVE")
        if version > live.version:
            raise Conflict(f"version: {version} is newer than {live.version}, which is LIVE; roll back to an older one")
        if not record.was_live:
            raise Conflict(f"version: {version} never was LIVE; roll back to one that was")
        if record.collected:
            raise Conflict(
                f"version: the files of {version} are gone; roll back to a newer one, and pin what must stay"
            )

    async def _check_files(self, version: int) -> None:
        """Where this host sees the folder that versions lie in, the version's own must be there."""
        manifest = await self._manifests.get(await self._state.record(version))
        folder = manifest.folder
        only_folders = all(isinstance(offer, FolderOffer) for offer in manifest.offers)
        if folder is not None and only_folders and folder.parent.is_dir() and not folder.is_dir():
            raise Conflict(f"version: the files of {version} are gone from {folder}; roll back to another one")

    async def _reserve(self, version: int, live: Live) -> Record:
        """The version's files are kept until the rollback of this number has happened."""

        def reserve(record: Record) -> Record:
            self._check(record, live)
            return replace(record, rollback=next_number(live))

        await self._state.change_record(version, reserve)
        return await self._state.record(version)

    async def _move(self, record: Record, *, keep_experience: bool, reason: str) -> Live:
        """The pointer afterwards: moved, unless another rollback took the number first."""
        moved = False

        def move(live: Live) -> Live | None:
            nonlocal moved
            moved = False
            if live.version == record.version or next_number(live) != record.rollback:
                return None
            self._check(record, live)
            moved = True
            return rolled_back(live, record, keep_experience=keep_experience, reason=reason)

        live = await self._state.change_pointer(move)
        if moved:
            log.warning("sync.run.rolled_back", version=record.version, withdrawn_to=live.newest_version, reason=reason)
        return live
