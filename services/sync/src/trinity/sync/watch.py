"""The Watch streams: each tells an explorer the versions to load, now and at every change. Built for a thousand."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import structlog

from trinity.runtime.errors import DataLoss
from trinity.sync.members import Members
from trinity.sync.store.manifests import Manifests
from trinity.sync.store.records import Member, Record
from trinity.sync.store.state import ChangeEvent, RunState
from trinity.sync.versions import current
from trinity.weights.pointer import Epoch, Live
from trinity.weights.wire import VersionState

log = structlog.get_logger(__name__)

_MOST_REJECTED = 100
_AGAIN_SECONDS = 0.01
_MEND_SECONDS = 1.0
_OFFERED = (VersionState.STAGED, VersionState.VERIFIED)


@dataclass(frozen=True)
class Selection:
    """The numbers of the versions and the epoch for one explorer. Versions are -1 and the epoch is 0 if absent."""

    live: int = -1
    gate_step: int = -1
    candidate: int = -1
    attempt: int = 0
    epoch: int = 0
    rejected: tuple[int, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Announcement:
    """A selection with the encoded manifests and the epoch that its numbers stand for."""

    live: bytes | None
    gate_step: int
    candidate: bytes | None
    epoch: Epoch | None = field(hash=False)  # a thousand members take long to hash
    rejected: tuple[int, ...]
    problem: str


class Watches:
    """The Watch streams of one run."""

    def __init__(self, state: RunState, members: Members, manifests: Manifests) -> None:
        self._state = state
        self._members = members
        self._manifests = manifests
        self._changed = ChangeEvent()
        self._reading = asyncio.Lock()  # a manifest is read from KV once for all streams
        self._live = Live()
        self._seen = -1  # value of RunState.changes
        self._common_selection = Selection()
        self._unreadable: dict[int, str] = {}  # versions whose manifest is damaged, with the problem
        self._failure = ""
        self.streams = 0

    def end(self, failure: str) -> None:
        """Ends all streams by a DataLoss."""
        self._failure = failure
        self._changed.notify()

    async def run(self) -> None:
        """Wakes the streams after changes that concern any of them."""
        told: object = None
        while True:
            change = self._state.changed.next()
            common = (self._common(), self._state.candidate, self._state.epoch, self._collective())
            if common != told:
                told = common
                self._changed.notify()
            is_whole = self._state.mirror.has_all_before(self._state.names.live_key)
            mends = _MEND_SECONDS if self._unreadable else None
            await asyncio.wait([change], timeout=mends if is_whole else _AGAIN_SECONDS)
            await self._read_again()

    async def _read_again(self) -> None:
        """Reads damaged manifests again, which may have been published again."""
        for version in list(self._unreadable):
            record = self._state.records.get(version)
            if record is None or not (await self._manifests.encoded_or_problem(record))[1]:
                del self._unreadable[version]
                self._seen = -1
                log.info("sync.manifest.mended", version=version)

    async def follow(self, lease_id: str) -> AsyncIterator[Announcement]:
        """Yields until the lease ends. Raises NotFound then, and for an unknown lease; DataLoss after `end`."""
        told: Selection | None = None
        self.streams += 1
        try:
            while True:
                change = self._changed.next()
                if self._failure:
                    raise DataLoss(self._failure)
                selection = self._selection(await self._members.find(lease_id))
                if selection != told:
                    if told is not None and _is_asked_again(told, selection):
                        yield await self._announcement(replace(selection, candidate=-1, attempt=0))
                    yield await self._announcement(selection)
                    told = selection
                await asyncio.wait({change, self._members.end(lease_id)}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.streams -= 1

    def _common(self) -> Selection:
        """Returns the part that is the same for every explorer, computed once for each change."""
        state = self._state
        is_whole = state.mirror.has_all_before(state.names.live_key)
        if self._seen == state.changes and (self._live is state.live or not is_whole):
            return self._common_selection
        if is_whole:
            self._live = state.live  # else versions that it was moved over may be unknown here
        live = self._live
        known = live.version if live.version in state.records else -1
        bad = (r.version for r in state.newest_first if current(r, state.live).state is VersionState.REJECTED)
        rejected = tuple(itertools.islice(bad, _MOST_REJECTED))
        problem = self._unreadable.get(known, "")
        self._seen = state.changes
        self._common_selection = Selection(known, live.gate_step, rejected=rejected, problem=problem)
        return self._common_selection

    def _selection(self, member: Member) -> Selection:
        common, state = self._common(), self._state
        if state.epoch.has(member.lease_id):
            common = replace(common, epoch=state.epoch.number)
        asked = state.candidate
        record = state.records.get(asked.version)
        if record is not None and asked.lease_id == member.lease_id and self._is_on_offer(record, asked.attempt):
            return replace(common, candidate=asked.version, attempt=asked.attempt)
        collective = self._collective()
        if collective is not None and common.epoch:
            return replace(common, candidate=collective.version)
        return common

    def _collective(self) -> Record | None:
        """Returns the version that is being sent to the members of the newest epoch."""
        newest = self._state.newest_first[:1]
        found = (r for r in newest if r.epoch and r.epoch == self._state.epoch.number and self._is_on_offer(r))
        return next(found, None)

    def _is_on_offer(self, record: Record, attempt: int = 0) -> bool:
        """Returns True if a version may be loaded before it is LIVE, and has not failed in this attempt."""
        if record.version <= self._state.live.version or current(record, self._state.live).state not in _OFFERED:
            return False
        return not any(failure.attempt == attempt for failure in record.failures)

    async def _announcement(self, selection: Selection) -> Announcement:
        """Reads the manifests; leaves unreadable ones out."""
        epoch = self._state.epoch
        async with self._reading:
            live = await self._manifest(selection.live)
            candidate = await self._manifest(selection.candidate)
        return Announcement(
            live,
            selection.gate_step,
            candidate,
            epoch if selection.epoch and selection.epoch == epoch.number else None,
            selection.rejected,
            self._unreadable.get(selection.live, ""),
        )

    async def _manifest(self, version: int) -> bytes | None:
        """Returns None for an unknown version or an unreadable manifest."""
        record = self._state.records.get(version)
        if record is None:
            return None
        found, problem = await self._manifests.encoded_or_problem(record)
        if problem and version not in self._unreadable:
            self._unreadable[version], self._seen = problem, -1
            log.error("sync.manifest.damaged", run=self._state.names.run, version=version, reason=problem)
            self._state.changed.notify()
        return found


def _is_asked_again(told: Selection, now: Selection) -> bool:
    """Returns True for the same candidate again: it must disappear first, or the explorer could not see the change."""
    return told.candidate == now.candidate >= 0 and 0 < told.attempt < now.attempt
