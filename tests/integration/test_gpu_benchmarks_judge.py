"""What the GPU scripts make of what a run left: shares of time, marks of missed limits, violations."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from support.audit import Acknowledged, LogEntry, Member, Records

pytestmark = pytest.mark.core

# Steps end at 10, 20, 30 and 40 s; each waits 2 s, takes 0.05 s of the buffer's, trains 6 s, publishes 1 s.
PARTS = {"time/wait": 2.0, "time/buffer": 0.05, "time/step": 6.0, "time/publish": 1.0, "time/save": 0.0}
STEPS = [
    {"step": step, "time": 10.0 * step, **PARTS, "sample/staleness_max": 2.0, "sample/response_tokens": 600.0}
    for step in (1, 2, 3, 4)
]
ARGS = argparse.Namespace(unmeasured=1, tasks=2, group=3, steps=4, size="tiny", cpu=True, median=8, sigma=1.0, cap=16)


@pytest.fixture(scope="module")
def scripts(repository: Path) -> Iterator[dict[str, ModuleType]]:
    """Imported as their main modules import each other."""
    before = list(sys.path)
    sys.path.insert(0, str(repository / "benchmarks/gpu"))
    import async_vs_sync
    import membership
    import membership_audit
    import membership_party
    import whole_run

    yield {m.__name__: m for m in (async_vs_sync, membership, membership_audit, membership_party, whole_run)}
    sys.path[:] = before


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "monitor").mkdir()
    (tmp_path / "monitor/trainer.jsonl").write_text("".join(json.dumps(line) + "\n" for line in STEPS) + '{"step": 5')
    return tmp_path


def test_shares_are_of_the_time_after_the_first_steps(scripts: dict[str, ModuleType], job: Path) -> None:
    responses = [{"begin": 5.0, "end": 15.0, "tokens": 100}, {"begin": 12.0, "end": 25.0, "tokens": 130}]
    found = scripts["async_vs_sync"].measured(ARGS, job, responses)
    assert found.steps_per_hour == pytest.approx(360)
    assert found.share("wait") == pytest.approx(0.2)
    assert found.share("buffer") == pytest.approx(0.005)
    assert found.sampling == pytest.approx(15 / 30)  # from 10 s to 25 s, twice for three of them
    assert found.running == pytest.approx((5 + 13) / 30)
    assert found.tokens_per_second == pytest.approx((50 + 130) / 30)
    assert found.trainer_tokens_per_second == pytest.approx(100)


def test_an_asynchronous_run_that_is_no_faster_misses_its_limit(scripts: dict[str, ModuleType], job: Path) -> None:
    found = scripts["async_vs_sync"].measured(ARGS, job, [{"begin": 10.0, "end": 11.0, "tokens": 9000}])
    rows = {row[0]: row for row in scripts["async_vs_sync"].table(ARGS, found, found).rows}
    assert rows["steps an hour"][-1] == "1.00 MISSED"
    assert rows["trainer: waits for experience, of the time"][-2:] == ("<= 3%", "6.67 MISSED")


def test_a_slower_explorer_may_be_waited_for(scripts: dict[str, ModuleType], job: Path) -> None:
    found = scripts["async_vs_sync"].measured(ARGS, job, [{"begin": 10.0, "end": 40.0, "tokens": 300}])
    rows = {row[0]: row for row in scripts["async_vs_sync"].table(ARGS, found, found).rows}
    assert rows["trainer: waits for experience, of the time"][-2:] == ("slower explorer", "")


def test_a_stall_is_the_events_before_it(scripts: dict[str, ModuleType], job: Path) -> None:
    late = {**STEPS[-1], "step": 5, "time": 90.0, "time/publish": 0.5}
    with (job / "monitor/trainer.jsonl").open("a") as lines:
        lines.write("\n" + json.dumps(late) + "\n")
    event = scripts["membership_party"].Event
    party = argparse.Namespace(main=argparse.Namespace(job=job), events=[event("killed", 35.0), event("joins", 5.0)])
    _, joins, killed = scripts["membership"].rows(party)
    assert (joins[0], joins[3], joins[4], joins[-1]) == ("joins", "2", "10.00", "0.25")
    assert (killed[0], killed[3], killed[4], killed[-1]) == ("killed", "2", "50.00", "1.25 MISSED")


def records(**changes: object) -> Records:
    """Two groups of tasks 1 and 2 stored, of which the first is trained; task 3 is outstanding."""
    log = [LogEntry(sequence, "group", f"t{sequence}", sequence, 7) for sequence in (1, 2)]
    values = {
        "log": log, "acknowledged": [Acknowledged("t2", 2, 2, 7)], "ledger": [(1, (Member(1, "t1", 1),))],
        "letters": [], "tasks": [(3, "t3")], "fed": 3, "said": {1: {(1,)}}, "summary": {},
    }  # fmt: skip
    return Records(**{**values, **changes})  # type: ignore[arg-type]


COUNTS = {"fed": 3, "stored": 2, "dead_letters": 0, "outstanding": 1, "duplicates_dropped": 0}


def test_what_is_whole_has_no_violation(scripts: dict[str, ModuleType]) -> None:
    assert scripts["membership_audit"].violations(records(), COUNTS) == []


@pytest.mark.parametrize(
    ("changes", "invariant"),
    [
        ({"acknowledged": [Acknowledged("t9", 9, 9, 7)]}, "I1"),
        ({"ledger": [(1, (Member(1, "t1", 1),)), (2, (Member(1, "t1", 1),))]}, "I2"),
        ({"said": {1: {(1,), (2,)}}}, "I3"),
        ({"fed": 4}, "I4"),
        ({"tasks": []}, "I4"),
    ],
)
def test_every_violation_is_found(scripts: dict[str, ModuleType], changes: dict[str, object], invariant: str) -> None:
    found = scripts["membership_audit"].violations(records(**changes), COUNTS)
    assert found
    assert all(what.startswith(invariant) for what in found), found
