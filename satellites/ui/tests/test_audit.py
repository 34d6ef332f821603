"""A ledger that adds up has no problem; one that was doctored has, and the problem names the groups."""

import re
from typing import Any

import pytest

from support.fakes.pages.recorded_run import GROUPS, STEPS, Doctored, counts_of, ledger
from trinity.reading import wire
from trinity.ui.audit import Audit, count_problems

pytestmark = pytest.mark.core


def read(found: Doctored) -> Audit:
    audit = Audit()
    for entry in found.entries:
        audit.read(wire.batch(entry), wire.account(entry))
    return audit


def test_a_ledger_that_adds_up() -> None:
    audit = read(ledger())
    assert audit.problems() == []
    assert audit.newest_step == STEPS
    assert sum(audit.staleness.values()) == STEPS * GROUPS
    assert count_problems(counts_of(ledger())) == []


def test_what_waits_what_was_dropped_and_what_died_is_somewhere() -> None:
    found = ledger(dropped={2: [101]}, dead=[102], requeued=[103], pending=[104, 105])
    assert read(found).problems() == []
    assert read(found).dropped == {"stale": 1}


def test_what_was_cut_is_at_its_step_and_its_late_group_is_no_stored_one() -> None:
    found = ledger(cut={1: [101, 102], 2: [103]}, late={3: [102]}, pending=[104])
    audit = read(found)
    assert audit.problems() == []
    assert [audit.fate(ordinal) for ordinal in (102, 103)] == [("cut", 1), ("cut", 2)]
    assert audit.dropped == {"cut": 1}
    assert count_problems(counts_of(found)) == []


@pytest.mark.parametrize(
    ("doctor", "said"),
    [
        (lambda found: found.cut(2, 101), "group 101 was cut before step 1 and before 2"),
        (lambda found: found.cut(3, 5), "group 5 was cut before step 3, and is in step 2"),
        (lambda found: found.entries[0].cut.pop(0), "step 3 counts 1 cut tasks; the entries name 0"),
        (lambda found: found.drop(3, 99, "cut"), "late, but of no cut task: group 99"),
        (lambda found: found.last.cursor.dead.append(101), "cut, but dead or not ended .*: group 101"),
        (lambda found: found.last.cursor.pending.add(ordinal=101), "in the ledger, but not stored .*: group 101"),
    ],
    ids=["twice", "trained", "count", "late", "dead", "pending"],
)
def test_a_cut_task_that_is_elsewhere_is_named(doctor: Any, said: str) -> None:
    found = ledger(cut={1: [101]})
    doctor(found)
    assert re.search(said, "; ".join(read(found).problems()))


@pytest.mark.parametrize(
    ("doctor", "said"),
    [
        (lambda found: found.entries[1].groups.pop(0), "no entry up to step 3, not dropped and not waiting: group 5"),
        (lambda found: found.move(5, 3), "group 5 is in step 2 and again in step 3"),
        (lambda found: found.last.cursor.__setattr__("stored", 13), "step 3 counts 13 stored groups; .* has 12"),
        (lambda found: found.last.cursor.__setattr__("dead_letters", 1), "counts 1 dead tasks and names 0"),
        (lambda found: found.last.groups[0].__setattr__("ordinal", 99), "not stored when step 3 was written: group 99"),
        (lambda found: found.drop(3, 5), "group 5 was dropped before step 3, and is in step 2"),
        (lambda found: (found.drop(2, 77), found.drop(3, 77)), "group 77 was dropped before step 2 and before 3"),
        (lambda found: found.last.groups[1].__setattr__("use_count", 2), "is used for time 2, the ledger has it 1"),
    ],
    ids=["missing", "twice", "count", "dead", "unknown", "dropped and used", "dropped twice", "uses"],
)  # fmt: skip
def test_a_doctored_ledger_is_named(doctor: Any, said: str) -> None:
    found = ledger()
    doctor(found)
    assert re.search(said, "; ".join(read(found).problems()))


def test_replay_takes_a_group_again_and_counts_its_uses() -> None:
    found = ledger(policy="replay")
    found.move(5, 3)
    (problem,) = read(found).problems()
    assert "use" in problem
    found.last.groups[-1].use_count = 2
    assert read(found).problems() == []


def test_a_cursor_that_is_kept_elsewhere_is_not_judged() -> None:
    found = ledger()
    found.last.ClearField("cursor")
    found.last.cursor_sequence = 9
    assert read(found).problems() == []
    assert read(found).account is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"fed": 14}, "14 tasks were fed; stored, dead, cut and outstanding together are 13"),
     ({"outstanding": -1, "fed": 11}, "outstanding is -1")],
)  # fmt: skip
def test_counts_that_do_not_add_up(changes: dict[str, int], said: str) -> None:
    assert count_problems(counts_of(ledger()) | changes) == [said]
