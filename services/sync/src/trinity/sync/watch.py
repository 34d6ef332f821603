"""Tells each explorer what to load, now and at every change; built for a thousand streams."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.runtime.errors import DataLoss
from trinity.sync import wire
from trinity.sync.members import Members
from trinity.sync.store.manifests import Manifests
from trinity.sync.store.records import Member, Record
from trinity.sync.store.state import ChangeEvent, RunState, judge
from trinity.weights import VersionState
from trinity.weights.pointer import Live

_REMEMBERED = 8
_AGAIN_SECONDS = 0.01
_OFFERED = (VersionState.STAGED, VersionState.VERIFIED)


@dataclass(frozen=True)
class View:
    """What one explorer is told. Versions are -1 and the epoch is 0 where there is none."""

    live: int = -1
    gate_step: int = -1
    candidate: int = -1
    attempt: int = 0
    epoch: int = 0
    rejected: tuple[int, ...] = ()


class Watches:
    """The Watch streams of one run."""

    def __init__(self, state: RunState, members: Members, manifests: Manifests) -> None:
        self._state = state
        self._members = members
        self._manifests = manifests
        self._changed = ChangeEvent()
        self._building = asyncio.Lock()
        self._built: OrderedDict[View, pb.WatchResponse] = OrderedDict()
        self._live = Live()
        self._failure = ""
        self.streams = 0

    def end(self, failure: str) -> None:
        """All streams, by a DataLoss."""
        self._failure = failure
        self._changed.notify()

    async def run(self) -> None:
        """Wake the streams, but only for what some of them tell."""
        told: object = None
        while True:
            change = self._state.changed.next()
            common = (self._common(), self._state.candidate, self._state.epoch, self._collective())
            if common != told:
                told = common
                self._changed.notify()
            is_whole = self._state.mirror.has_all_before(self._state.names.live_key)
            await asyncio.wait([change], timeout=None if is_whole else _AGAIN_SECONDS)

    async def follow(self, lease_id: str) -> AsyncIterator[pb.WatchResponse]:
        """Until the lease ends: NotFound then, as for a lease that never was. DataLoss if `end` was called."""
        told: View | None = None
        self.streams += 1
        try:
            while True:
                change = self._changed.next()
                if self._failure:
                    raise DataLoss(self._failure)
                view = self._view(await self._members.find(lease_id))
                if view != told:
                    if told is not None and _is_asked_again(told, view):
                        yield await self._response(replace(view, candidate=-1, attempt=0))
                    yield await self._response(view)
                    told = view
                await asyncio.wait({change, self._members.end(lease_id)}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.streams -= 1

    def _common(self) -> View:
        """What every explorer is told."""
        if self._state.mirror.has_all_before(self._state.names.live_key):
            self._live = self._state.live  # else there may be versions it was moved over that are not known here
        live = self._live
        known = live.version if live.version in self._state.records else -1
        return View(live=known, gate_step=live.gate_step, rejected=self._state.rejected)

    def _view(self, member: Member) -> View:
        view, state = self._common(), self._state
        if state.epoch.has(member.lease_id):
            view = replace(view, epoch=state.epoch.number)
        asked = state.candidate
        record = state.records.get(asked.version)
        if record is not None and asked.lease_id == member.lease_id and self._is_on_offer(record, asked.attempt):
            return replace(view, candidate=asked.version, attempt=asked.attempt)
        collective = self._collective()
        if collective is not None and view.epoch:
            return replace(view, candidate=collective.version)
        return view

    def _collective(self) -> Record | None:
        """The version that is being sent to the members of the newest epoch."""
        newest = self._state.newest_first[:1]
        found = (r for r in newest if r.epoch and r.epoch == self._state.epoch.number and self._is_on_offer(r))
        return next(found, None)

    def _is_on_offer(self, record: Record, attempt: int = 0) -> bool:
        """Whether it may be loaded before it is LIVE, and has not failed in this attempt."""
        if record.version <= self._state.live.version or judge(record, self._state.live).state not in _OFFERED:
            return False
        return not any(failure.attempt == attempt for failure in record.failures)

    async def _response(self, view: View) -> pb.WatchResponse:
        """Built once for all streams that tell the same."""
        async with self._building:
            if view not in self._built:
                self._built[view] = await self._build(view)
                while len(self._built) > _REMEMBERED:
                    self._built.popitem(last=False)
            return self._built[view]

    async def _build(self, view: View) -> pb.WatchResponse:
        records, epoch = self._state.records, self._state.epoch
        response = pb.WatchResponse(gate_step=view.gate_step, rejected=view.rejected)
        if view.live in records:
            response.live.CopyFrom(await self._manifests.message(records[view.live]))
        if view.candidate in records:
            response.candidate.CopyFrom(await self._manifests.message(records[view.candidate]))
        if view.epoch and view.epoch == epoch.number:
            response.epoch.CopyFrom(wire.epoch_to_proto(epoch))
        return response


def _is_asked_again(told: View, view: View) -> bool:
    """The same version a second time: it must disappear first, or explorers could not see the change."""
    return told.candidate == view.candidate >= 0 and 0 < told.attempt < view.attempt
