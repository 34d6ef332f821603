"""Which versions' files are not needed any more, so that the trainer may delete them."""

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import replace

import structlog

from trinity.sync.store.records import Record
from trinity.sync.store.state import RunState, judge
from trinity.weights import VersionState
from trinity.weights.pointer import Live

log = structlog.get_logger(__name__)

DEFAULT_KEPT = 3
# Told again with each commit, for a trainer that died before it deleted them.
_TOLD_AGAIN = 20
_GOOD = (VersionState.VERIFIED, VersionState.LIVE, VersionState.RETIRED)


def needed(newest_first: Iterable[Record], live: Live, held: Collection[int], kept: int) -> set[int]:
    """Versions whose files must stay, of those whose files are not released yet.

    The `kept` newest good ones and everything newer, what is LIVE, pinned, held by an explorer or about to be LIVE
    again, and the chains of bases of the deltas of all these. Version 0 has no files; it always can be gone back to.
    """
    known = {record.version: record for record in newest_first}
    stay: set[int] = set()
    good = 0
    for record in known.values():
        if good < kept or _is_wanted(record, live, held):
            stay.add(record.version)
        good += record.state is VersionState.VERIFIED and judge(record, live).state in _GOOD
    for version in list(stay):
        base = known[version].base_version
        while base in known and base not in stay:
            stay.add(base)
            base = known[base].base_version
    return stay


def _is_wanted(record: Record, live: Live, held: Collection[int]) -> bool:
    rollbacks = live.rollback.number if live.rollback else 0
    return record.version in (0, live.version) or record.pinned or record.version in held or record.rollback > rollbacks


class Collector:
    """Releases the files of one run's versions."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    async def collect(self, held: Collection[int], kept: int) -> list[int]:
        """Mark what is not needed; returns it, with what was marked last before, oldest first."""
        state = self._state
        stay = needed(state.newest_first, await state.pointer(), held, kept or DEFAULT_KEPT)
        candidates = [r.version for r in state.newest_first if r.version not in stay and not r.collected]
        released = [v for v in await asyncio.gather(*(self._release(v, held, kept) for v in candidates)) if v >= 0]
        if released:
            log.info("sync.version.collectable", versions=sorted(released))
        told_before = [r.version for r in state.newest_first if r.collected and r.version not in released]
        return sorted({*released, *told_before[:_TOLD_AGAIN]})

    async def _release(self, version: int, held: Collection[int], kept: int) -> int:
        """The version, or -1 if something needs it since; marked so that no pin and no rollback comes in between."""
        live = self._state.live

        def mark(record: Record) -> Record | None:
            return None if _is_wanted(record, live, held) else replace(record, collected=True)

        return version if await self._state.change_record(version, mark) is not None else -1
