"""Every state and every event of versions.py's table, and the facts beside the state that refuse an event."""

from dataclasses import replace

import pytest

from support.servers.sync_instances import measured
from trinity.runtime.errors import Conflict, NotFound
from trinity.sync import versions
from trinity.sync.store.records import Failure, Record
from trinity.sync.versions import (
    Event,
    GoLive,
    NotLoaded,
    Pin,
    Register,
    Reject,
    Release,
    RollBack,
    Verify,
    current,
    transition,
)
from trinity.weights.pointer import Live
from trinity.weights.wire import VersionState

pytestmark = pytest.mark.core

LIVE = Live(version=5, step=5, gate_step=5, newest_version=7, newest_step=7)
ONE, TWO = Failure("a", 1, "damaged"), Failure("b", 2, "damaged too")
RECORDS = {
    "unknown": None,
    "STAGED": Record(7, 7, "digest", VersionState.STAGED),
    "VERIFIED": Record(7, 7, "digest", VersionState.VERIFIED),
    "LIVE": Record(5, 5, "digest", VersionState.VERIFIED, was_live=True),
    "RETIRED": Record(3, 3, "digest", VersionState.VERIFIED, was_live=True),
    "REJECTED": Record(7, 7, "digest", VersionState.REJECTED, "damaged"),
}
EVENTS: dict[str, Event] = {
    "Register": Register(Record(8, 8, "digest", VersionState.STAGED)),
    "Verify": Verify(measured(7)),
    "Reject": Reject("failed its canary", measured(7)),
    "NotLoaded": NotLoaded(ONE),
    "NotLoaded again": NotLoaded(TWO),
    "GoLive": GoLive(),
    "RollBack": RollBack(),
    "Pin": Pin(True),
    "Release": Release(),
}


def table() -> list[tuple[str, str, str]]:
    """Event, state and cell, as the docstring of versions.py has them."""
    lines = [line.strip() for line in (versions.__doc__ or "").splitlines()]
    head = next(index for index, line in enumerate(lines) if line.startswith("event "))
    rows = lines[head : lines.index("", head)]
    states = rows[0].split()[1:]
    cells = [(row[: row.index("  ")].strip(), row[row.index("  ") :].split()) for row in rows[1:]]
    return [(event, state, cell) for event, row in cells for state, cell in zip(states, row, strict=True)]


def test_the_table_has_every_event_and_every_state() -> None:
    assert {event for event, _, _ in table()} == EVENTS.keys()
    assert {type(event) for event in EVENTS.values()} == set(Event.__args__)  # type: ignore[attr-defined]
    assert {state for _, state, _ in table()} == RECORDS.keys() == {"unknown", *VersionState.__members__}
    assert len(table()) == len(EVENTS) * len(RECORDS)


@pytest.mark.parametrize(("name", "state", "cell"), table())
def test_an_event_does_what_the_table_says(name: str, state: str, cell: str) -> None:
    record, event = RECORDS[state], EVENTS[name]
    if record is not None:
        assert current(record, LIVE).state.name == state
        if name == "NotLoaded again":
            record = replace(record, failures=(ONE,))
    if cell in ("NotFound", "Conflict"):
        with pytest.raises(NotFound if cell == "NotFound" else Conflict, match=r"\w+: "):
            transition(LIVE, record, event)
        return
    live, after = transition(LIVE, record, event)
    if cell == "-":
        assert (live, after) == (LIVE, record)
    else:
        assert (live, after) != (LIVE, record)
        assert current(after, live).state.name == cell
    assert transition(live, after, event) == (live, after), "an event that is repeated changes nothing more"


@pytest.mark.parametrize(
    ("record", "event", "reason"),
    [
        (None, Register(Record(6, 6, "", VersionState.STAGED)), "is 6, must be newer than 7"),
        (RECORDS["LIVE"], Register(Record(5, 5, "other", VersionState.STAGED)), "5 exists with another content"),
        (None, Register(Record(8, 8, "", VersionState.STAGED), claim=1), "another trainer has taken the run over"),
        (None, Register(Record(8, 8, "", VersionState.STAGED), rollback=0), "rolled back to version 4, which these"),
        (Record(3, 3, "", VersionState.VERIFIED), RollBack(), "3 never was LIVE"),
        (Record(3, 3, "", VersionState.VERIFIED, was_live=True, collected=True), RollBack(), "files of 3 are gone"),
        (Record(7, 7, "", VersionState.VERIFIED, collected=True), Pin(True), "files of 7 may be deleted"),
    ],
)  # fmt: skip
def test_other_facts_refuse_an_event_too(record: Record | None, event: Event, reason: str) -> None:
    moved, _ = transition(
        replace(LIVE, version=6, newest_version=6), Record(4, 4, "", VersionState.VERIFIED, was_live=True), RollBack()
    )
    after_rollback = replace(LIVE, claim=2, rollbacks=moved.rollbacks)
    with pytest.raises(Conflict, match=reason):
        transition(after_rollback, record, event)


def test_what_a_rollback_withdrew_is_rejected_for_ever() -> None:
    retired = RECORDS["RETIRED"]
    live, reserved = transition(LIVE, retired, RollBack(reason="worse"))
    assert (live.version, live.gate_step, reserved.rollback) == (3, 7, 1)
    for state in ("STAGED", "VERIFIED", "LIVE"):
        record = RECORDS[state]
        assert record is not None
        assert current(record, live).reason == "withdrawn by a rollback to version 3: worse"
        for event in (Verify(measured(7)), Reject("late"), NotLoaded(ONE)):
            assert transition(live, record, event) == (live, record)
        for event in (GoLive(), RollBack()):
            with pytest.raises(Conflict, match="REJECTED"):
                transition(live, record, event)


def test_a_version_that_was_overtaken_while_it_was_staged_is_verified_but_not_live() -> None:
    overtaken = Record(4, 4, "", VersionState.STAGED)
    assert current(overtaken, LIVE).state is VersionState.STAGED
    live, verified = transition(LIVE, overtaken, Verify(measured(4)))
    assert (live, current(verified, live).state) == (LIVE, VersionState.RETIRED)
    with pytest.raises(Conflict, match="4 never was LIVE"):
        transition(live, verified, RollBack())
