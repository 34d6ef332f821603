"""The states of versions: STAGED, VERIFIED, LIVE, RETIRED, REJECTED. Every change is a compare-and-set on one key.

A version's record says what was found out about it; which one is LIVE is one pointer. What needs both is done in an
order that may stop at any point. The next call of `settle` finishes it: by this instance, another one, or this one
after a restart.
"""

from collections.abc import Iterable
from dataclasses import replace

import structlog

from trinity.runtime.broker import SequenceConflict
from trinity.runtime.errors import Conflict
from trinity.runtime.names import RunNames
from trinity.sync.store import records
from trinity.sync.store.records import Measured, Record
from trinity.sync.store.state import Judged, RunState, judge
from trinity.weights import VersionState
from trinity.weights.pointer import Live, decode_live, encode_live

log = structlog.get_logger(__name__)


def next_live(newest_first: Iterable[Record], live: Live) -> Record | None:
    """The newest version that is VERIFIED and committed, if it is newer than the one that is LIVE."""
    for record in newest_first:
        if record.version <= live.version:
            return None
        if record.committed and judge(record, live).state is VersionState.VERIFIED:
            return record
    return None


def gate_step(newest_first: Iterable[Record], live: Live) -> int:
    """Step up to which gates are met: the LIVE version's, and on over the rejected versions that follow it at once."""
    newer = [record for record in newest_first if record.version > live.version]
    gate = max(live.gate_step, live.step)
    for record in reversed(newer):
        if judge(record, live).state is not VersionState.REJECTED:
            break
        gate = max(gate, record.step)
    return gate


class Versions:
    """Versions of one run."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._names: RunNames = state.names

    async def get(self, version: int) -> Judged:
        """NotFound if there is no such version."""
        record = await self._state.record(version)
        return judge(record, await self._state.pointer())

    def all(self) -> list[Judged]:
        """Newest first, as far as this process knows."""
        return [judge(record, self._state.live) for record in self._state.newest_first]

    async def register(self, record: Record, *, claim: int | None, rollback: int | None) -> Judged:
        """Write a new version's record. Conflict if it is not newer than all others, or not its maker's turn.

        The number is taken in the pointer first, so that two versions, a version and a rollback, or an old trainer and
        its successor, meet there in one order.
        """

        def take(live: Live) -> Live:
            if claim is not None and live.claim > claim:
                raise Conflict("lease_id: another trainer has taken the run over since; start again from a checkpoint")
            if rollback is not None and live.rollback is not None and live.rollback.number != rollback:
                to = live.rollback.version
                raise Conflict(f"rollback: the run was rolled back to version {to}, which these weights do not follow")
            there = self._state.records.get(record.version)
            if there is not None and there.digest == record.digest:
                return live  # another instance was asked too
            newest = max([live.newest_version, *self._state.records])
            if record.version < newest or there is not None or live.is_withdrawn(record.version):
                raise Conflict(f"manifest.version: is {record.version}, must be newer than {newest}")
            return replace(
                live,
                newest_version=record.version,
                newest_step=max(live.newest_step, record.step),
                claim=max(live.claim, claim or 0),
            )

        await self._state.change_pointer(take)
        try:
            await self._state.mirror.put_if(self._names.version_key(record.version), records.encode(record), 0)
            log.info("sync.version.staged", version=record.version, step=record.step, state=record.state.name)
        except SequenceConflict:
            there = await self._state.record(record.version)
            if there.digest != record.digest:
                raise Conflict(
                    f"manifest.version: {record.version} exists with another content; versions never change"
                ) from None
        await self.settle()
        return await self.get(record.version)

    async def verify(self, version: int, measured: Measured) -> None:
        """The canary was reproduced. A version that was judged before stays what it is."""

        def pass_(record: Record) -> Record | None:
            if record.state is not VersionState.STAGED:
                return None
            return replace(record, state=VersionState.VERIFIED, measured=measured)

        if await self._state.change_record(version, pass_):
            log.info("sync.version.verified", version=version, explorer=measured.explorer_id, error=measured.max_error)
        await self.settle()

    async def reject(self, version: int, reason: str, measured: Measured | None = None) -> None:
        """It failed a check. A version that was judged before stays what it is."""

        def fail(record: Record) -> Record | None:
            if record.state is not VersionState.STAGED:
                return None
            return replace(record, state=VersionState.REJECTED, reason=reason, measured=measured)

        if await self._state.change_record(version, fail):
            log.warning("sync.version.rejected", version=version, reason=reason)
        await self.settle()

    async def commit(self, version: int) -> Judged:
        """VERIFIED -> LIVE, now or as soon as it is VERIFIED. Idempotent.

        Conflict for a version that is REJECTED or older than the LIVE one.
        """
        judged = await self.get(version)
        if judged.state is VersionState.REJECTED:
            raise Conflict(f"version: {version} is REJECTED ({judged.reason}); only a VERIFIED version goes LIVE")
        if not judged.record.committed:
            live = await self._state.pointer()
            if version < live.version:
                raise Conflict(f"version: {version} is older than {live.version}, which is LIVE")
            await self._state.change_record(version, lambda record: replace(record, committed=True))
            log.info("sync.version.committed", version=version, state=judged.state.name)
        await self.settle()
        return await self.get(version)

    async def pin(self, version: int, pinned: bool) -> None:
        """Keep a version's files, or not. Conflict if they may be gone."""

        def change(record: Record) -> Record:
            if pinned and record.collected:
                raise Conflict(f"version: the files of {version} may be deleted already; pin a newer version")
            return replace(record, pinned=pinned)

        await self._state.change_record(version, change)
        log.info("sync.version.pinned" if pinned else "sync.version.unpinned", version=version)

    def is_settled(self) -> bool:
        """Whether nothing is left to do, as far as this process knows."""
        state = self._state
        if next_live(state.newest_first, state.live) is not None:
            return False
        return gate_step(state.newest_first, state.live) == state.live.gate_step

    async def settle(self) -> None:
        """Move the pointer to what is VERIFIED and committed, and the gate over what was rejected."""
        state = self._state
        while not self.is_settled():
            entry = await state.mirror.fresh(self._names.live_key)
            live = decode_live(entry.value)
            record = next_live(state.newest_first, live)
            moved = live
            if record is not None:
                await self._mark_was_live(live.version)
                moved = replace(live, version=record.version, step=record.step)
            moved = replace(moved, gate_step=gate_step(state.newest_first, moved))
            if moved == live:
                continue  # the copy has caught up
            if moved.gate_step > max(live.gate_step, moved.step) and not await state.mirror.catches_up():
                continue  # between the versions that were rejected there was one that may still come
            try:
                await state.mirror.put_if(self._names.live_key, encode_live(moved), entry.revision)
            except SequenceConflict:
                continue
            if record is not None:
                log.info("sync.version.live", version=moved.version, step=moved.step, before=live.version)
            log.info("sync.gate.moved", step=moved.gate_step)

    async def _mark_was_live(self, version: int) -> None:
        """Before the pointer leaves a version: it was LIVE, and a rollback may go back to it."""
        known = self._state.records.get(version)
        if version >= 0 and (known is None or not known.was_live):
            await self._state.change_record(version, lambda record: replace(record, was_live=True))
