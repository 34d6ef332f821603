"""Collective groups, as numbered epochs: the same number while the members are the same, else a new one."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import structlog

from trinity.runtime.errors import InvalidInput
from trinity.sync.store import records
from trinity.sync.store.records import Epoch, EpochMember, Member
from trinity.sync.store.state import RunState
from trinity.weights.pointer import Live

log = structlog.get_logger(__name__)

BACKENDS = ("gloo", "nccl")
_READY = ("running", "waiting", "updating")


def ready_members(members: Sequence[Member], live: Live, backend: str, excluded: Collection[str]) -> list[Member]:
    """Explorers that can and may take part in the next update, by name."""
    return sorted(
        (
            member
            for member in members
            if f"collective-{backend}" in member.capabilities.transports
            and member.state in _READY
            and (live.version < 0 or member.version == live.version)
            and member.explorer_id not in excluded
        ),
        key=lambda member: member.explorer_id,
    )


def ranked(members: Sequence[Member]) -> tuple[EpochMember, ...]:
    """The trainer is rank 0; each member has a rank for every worker of every engine."""
    first, found = 1, []
    for member in members:
        ranks = max(1, member.capabilities.engines) * max(1, member.capabilities.tensor_parallel_size)
        found.append(EpochMember(member.explorer_id, member.lease_id, first, ranks))
        first += ranks
    return tuple(found)


class Epochs:
    """The epochs of one run."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    async def form(
        self, members: Sequence[Member], backend: str, store_address: str, excluded: Collection[str], *, renew: bool
    ) -> Epoch:
        """The epoch for the next update. It has no members if none is ready; members of the last one are told."""
        if backend not in BACKENDS:
            raise InvalidInput("backend", f"is {backend!r}, must be one of {', '.join(BACKENDS)}")
        if not store_address:
            raise InvalidInput("store_address", "is empty; members must know where to meet")
        wanted = ranked(ready_members(members, self._state.live, backend, excluded))
        formed = Epoch()

        def change(value: bytes) -> bytes | None:
            nonlocal formed
            formed = records.decode_epoch(value)
            same = (formed.backend, formed.store_address, formed.members) == (backend, store_address, wanted)
            if (same and not renew) or not (wanted or formed.members):
                return None
            formed = replace(
                formed, number=formed.number + 1, backend=backend, store_address=store_address, members=wanted
            )
            return records.encode(formed)

        before = self._state.epoch.number
        await self._state.mirror.change(self._state.names.epoch_key, change)
        if formed.number != before:
            log.info("sync.epoch.formed", number=formed.number, backend=backend, members=len(formed.members))
        return formed
