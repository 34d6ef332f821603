"""The states of weight versions: one table of events, and `transition`, the one pure function that makes them happen.

A version's record has its verification result (STAGED, then VERIFIED or REJECTED, for ever). One pointer names the
LIVE version. RETIRED and withdrawn follow from both, so no other place can differ: see `current`.

    event            unknown    STAGED     VERIFIED   LIVE       RETIRED    REJECTED
    Register         STAGED     -          -          -          -          -
    Verify           NotFound   VERIFIED   -          -          -          -
    Reject           NotFound   REJECTED   -          -          -          -
    NotLoaded        NotFound   STAGED     -          -          -          -
    NotLoaded again  NotFound   REJECTED   -          -          -          -
    GoLive           NotFound   Conflict   LIVE       -          Conflict   Conflict
    RollBack         NotFound   Conflict   Conflict   -          LIVE       Conflict
    Pin              NotFound   STAGED     VERIFIED   LIVE       RETIRED    REJECTED
    Release          NotFound   STAGED     VERIFIED   -          RETIRED    REJECTED

The table gives the state after the event. An unchanged state means that another field of the record changes; "-" that
nothing changes, since it was decided before. NotFound and Conflict refuse the event. Other facts refuse some events
too: Register for a number that is not the newest, another content, an older claim, or weights that do not follow the
newest rollback; RollBack for a version that never was LIVE; RollBack and Pin for released files.

A VERIFIED version goes LIVE at once if it is newer than the LIVE version; it stays VERIFIED only until then.
"""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from trinity.runtime.errors import Conflict, NotFound
from trinity.sync.store.records import Failure, Measured, Record
from trinity.weights.pointer import MOST_ROLLBACKS, Live, Rollback
from trinity.weights.wire import VersionState

MOST_FAILURES = 2
_GOOD = (VersionState.VERIFIED, VersionState.LIVE, VersionState.RETIRED)


@dataclass(frozen=True)
class Register:
    """A trainer publishes a version. `claim` and `rollback` are the newest that the trainer knows; None: unchecked."""

    record: Record
    claim: int | None = None
    rollback: int | None = None


@dataclass(frozen=True)
class Verify:
    """An explorer reproduced the canary, and its files are those of the manifest where sync sees them."""

    measured: Measured


@dataclass(frozen=True)
class Reject:
    """The version failed its canary, or its files differ from the manifest."""

    reason: str
    measured: Measured | None = None


@dataclass(frozen=True)
class NotLoaded:
    """The candidate's explorer could not load the version or compute its canary: MOST_FAILURES of these reject it."""

    failure: Failure


@dataclass(frozen=True)
class GoLive:
    """The pointer moves on to the version."""


@dataclass(frozen=True)
class RollBack:
    """The pointer moves back to the version, and all newer versions are withdrawn."""

    keep_experience: bool = False
    reason: str = ""
    at_seconds: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Pin:
    """The version's files stay, or no longer stay."""

    pinned: bool


@dataclass(frozen=True)
class Release:
    """The version's files may be deleted, unless it is LIVE, pinned, in `held`, or about to be LIVE again."""

    held: frozenset[int] = frozenset()


Event = Register | Verify | Reject | NotLoaded | GoLive | RollBack | Pin | Release


@dataclass(frozen=True)
class VersionStatus:
    """A version's record with the state that follows from it and the pointer."""

    record: Record
    state: VersionState
    reason: str = ""


def current(record: Record, live: Live) -> VersionStatus:
    """Returns the status of a version. A version overtaken while STAGED stays STAGED: it is not verified."""
    if live.is_withdrawn(record.version):
        rollback = next((r for r in reversed(live.rollbacks) if r.withdraws(record.version)), None)
        why = f": {rollback.reason}" if rollback and rollback.reason else ""
        to = f" to version {rollback.version}" if rollback else ""
        return VersionStatus(record, VersionState.REJECTED, f"withdrawn by a rollback{to}{why}")
    if record.state is VersionState.REJECTED:
        return VersionStatus(record, record.state, record.reason)
    if record.version == live.version:
        return VersionStatus(record, VersionState.LIVE)
    if record.version < live.version and record.state is VersionState.VERIFIED:
        return VersionStatus(record, VersionState.RETIRED)
    return VersionStatus(record, record.state)


def transition(live: Live, record: Record | None, event: Event) -> tuple[Live, Record]:
    """Returns the pointer and the version's record after the event, by the table above.

    `record` is None for a version that the run does not have. Raises NotFound and Conflict as the table says.
    """
    if isinstance(event, Register):
        return _register(live, record, event)
    if record is None:
        raise NotFound("version: this run has no such version")
    is_staged = current(record, live).state is VersionState.STAGED
    match event:
        case Verify(measured) if is_staged:
            return live, replace(record, state=VersionState.VERIFIED, measured=measured)
        case Reject(reason, measured) if is_staged:
            return live, replace(record, state=VersionState.REJECTED, reason=reason, measured=measured)
        case NotLoaded(failure) if is_staged:
            return live, _not_loaded(record, failure)
        case GoLive():
            return _go_live(live, record)
        case RollBack():
            return _roll_back(live, record, event)
        case Pin(pinned):
            if pinned and record.collected:
                raise Conflict(f"version: the files of {record.version} may be deleted already; pin a newer version")
            return live, replace(record, pinned=pinned)
        case Release(held) if not is_wanted(record, live, held):
            return live, replace(record, collected=True)
    return live, record


def _register(live: Live, record: Record | None, event: Register) -> tuple[Live, Record]:
    made, claim, rollback = event.record, event.claim, event.rollback
    if record is not None:
        if record.digest != made.digest:
            raise Conflict(f"manifest.version: {made.version} exists with another content; versions never change")
        return live, record  # the answer was lost, or another instance was called too
    if claim is not None and live.claim > claim:
        raise Conflict("lease_id: another trainer has taken the run over since; start again from a checkpoint")
    if rollback is not None and live.rollback is not None and live.rollback.number != rollback:
        to = live.rollback.version
        raise Conflict(f"rollback: the run was rolled back to version {to}, which these weights do not follow")
    if made.version < live.newest_version or live.is_withdrawn(made.version):
        raise Conflict(f"manifest.version: is {made.version}, must be newer than {live.newest_version}")
    newest_step = max(live.newest_step, made.step)
    taken = replace(live, newest_version=made.version, newest_step=newest_step, claim=max(live.claim, claim or 0))
    return taken, made


def _not_loaded(record: Record, failure: Failure) -> Record:
    """Adds a failure, once for each attempt."""
    if any(known.attempt == failure.attempt for known in record.failures):
        return record
    failures = (*record.failures, failure)
    if len(failures) < MOST_FAILURES:
        return replace(record, failures=failures)
    told = "; ".join(f"{known.explorer_id}: {known.reason}" for known in failures)
    return replace(record, failures=failures, state=VersionState.REJECTED, reason=f"could not be loaded, by {told}")


def _go_live(live: Live, record: Record) -> tuple[Live, Record]:
    version = current(record, live)
    if version.state is VersionState.LIVE:
        return live, record
    if version.state is not VersionState.VERIFIED:
        raise Conflict(f"version: {record.version} is {version.state.name}; only a VERIFIED version goes LIVE")
    gate = max(live.gate_step, record.step)
    return replace(live, version=record.version, step=record.step, gate_step=gate), replace(record, was_live=True)


def next_number(live: Live) -> int:
    """Returns the number of the next rollback."""
    return live.rollback.number + 1 if live.rollback else 1


def _roll_back(live: Live, record: Record, event: RollBack) -> tuple[Live, Record]:
    """Moves the pointer, which holds the rollback, in one write; drops ranges that the rollback covers."""
    number, version = record.version, current(record, live)
    if version.state is VersionState.LIVE:
        return live, record
    if version.state is VersionState.REJECTED:
        raise Conflict(f"version: {number} is REJECTED ({version.reason}); roll back to one that was LIVE")
    if number > live.version:
        raise Conflict(f"version: {number} is newer than {live.version}, which is LIVE; roll back to an older one")
    if not record.was_live:
        raise Conflict(f"version: {number} never was LIVE; roll back to one that was")
    if record.collected:
        raise Conflict(f"version: the files of {number} are gone; roll back to a newer one, and pin what must stay")
    rollback = Rollback(
        next_number(live), number, live.newest_version, live.newest_step, event.keep_experience, event.reason,
        event.at_seconds,
    )  # fmt: skip
    kept = tuple(span for span in live.withdrawn if span[0] < number)
    moved = replace(
        live,
        version=number,
        step=record.step,
        gate_step=max(live.gate_step, live.newest_step),
        rollbacks=(*live.rollbacks, rollback)[-MOST_ROLLBACKS:],
        withdrawn=(*kept, (number, live.newest_version)),
    )
    return moved, replace(record, rollback=rollback.number)  # its files stay until the pointer has moved


def is_wanted(record: Record, live: Live, held: Collection[int]) -> bool:
    """Returns True if a version's files must stay for its own sake. A rollback to version 0 is always possible."""
    rollbacks = live.rollback.number if live.rollback else 0
    return record.version in (0, live.version) or record.pinned or record.version in held or record.rollback > rollbacks


def next_live(newest_first: Iterable[Record], live: Live) -> Record | None:
    """Returns the newest VERIFIED version if it is newer than the LIVE version."""
    for record in newest_first:
        if record.version <= live.version:
            return None
        if current(record, live).state is VersionState.VERIFIED:
            return record
    return None


def gate_step(newest_first: Iterable[Record], live: Live) -> int:
    """Returns the step up to which gates are met: the LIVE version's, moved on over rejected versions that follow."""
    newer = [record for record in newest_first if record.version > live.version]
    gate = max(live.gate_step, live.step)
    for record in reversed(newer):
        if current(record, live).state is not VersionState.REJECTED:
            break
        gate = max(gate, record.step)
    return gate


def needed(newest_first: Iterable[Record], live: Live, held: Collection[int], kept: int) -> set[int]:
    """Returns the versions whose files must stay.

    These are the `kept` newest good versions and all newer ones; versions that are LIVE, pinned, held by an explorer or
    about to be LIVE again; version 0; and the chains of bases of the deltas of all these.
    """
    known = {record.version: record for record in newest_first}
    stay: set[int] = set()
    good = 0
    for record in known.values():
        if good < kept or is_wanted(record, live, held):
            stay.add(record.version)
        good += record.state is VersionState.VERIFIED and current(record, live).state in _GOOD
    for version in list(stay):
        base = known[version].base_version
        while base in known and base not in stay:
            stay.add(base)
            base = known[base].base_version
    return stay
