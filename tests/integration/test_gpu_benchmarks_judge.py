"""What the GPU scripts make of what a run left: shares of time, marks of missed limits, violations."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from support.checks.audit import Acknowledged, LogEntry, Member, Records
from support.checks.stopped_audit import violations

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
    import membership_party
    import real_model
    import whole_run
    import word_problems

    modules = (async_vs_sync, membership, membership_party, real_model, whole_run, word_problems)
    yield {m.__name__: m for m in modules}
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


def test_what_is_whole_has_no_violation() -> None:
    assert violations(records(), COUNTS) == []


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
def test_every_violation_is_found(changes: dict[str, object], invariant: str) -> None:
    found = violations(records(**changes), COUNTS)
    assert found
    assert all(what.startswith(invariant) for what in found), found


def judged(*accuracies: float) -> list[dict[str, float]]:
    """Fifty problems of each template, of which these parts are right."""
    return [
        {"template": template, "right": float(number < 50 * accuracy)}
        for template, accuracy in enumerate(accuracies)
        for number in range(50)
    ]


def test_problems_of_one_template_count_as_one_when_an_interval_is_made(scripts: dict[str, ModuleType]) -> None:
    gain = scripts["real_model"].gain
    assert gain(judged(1.0, 0.0), judged(0.0, 0.0)) == (0.5, 0.0, 1.0)
    assert gain(judged(0.6, 0.6), judged(0.2, 0.2)) == pytest.approx((0.4, 0.4, 0.4))
    assert gain(judged(0.5)) == (0.5, 0.5, 0.5)


def test_a_gain_that_may_be_none_misses_its_limit(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    real_model = scripts["real_model"]
    found = {"before": judged(0.2, 0.2, 0.2), "seed-1": judged(0.5, 0.5, 0.5), "trl": judged(0.1, 0.2, 0.9)}
    for name, rows in found.items():
        (tmp_path / f"judged-{name}.json").write_text(json.dumps(dict.fromkeys(real_model.SPLITS, rows)))
    run = {"steps": [{"reward": 0.5}], "tokens_generated": 1, "seconds": 60.0, "gpu_seconds": 120.0, "kl": 1e-3}
    learnt, cost = real_model.tables(tmp_path, {"seed-1": run, "trl": run})
    ours, peer = learnt.rows[:2]
    assert ours[2:5] == ("0.500 [0.500, 0.500]", "+0.300 [+0.300, +0.300]", "> 0")
    assert ours[5].startswith("+0.100 [")
    assert (peer[4], peer[5]) == ("> 0 MISSED", "")
    assert cost.rows[0] == ("seed-1", "1", "1", "1.0", "2.0", "0.500, 0.500", "1.0e-03")


def test_the_picture_is_drawn_of_what_the_folder_has(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps = [{"step": step, "seconds": 60.0 * step, "reward": 0.1 * step} for step in (1, 2)]
    curve = [{"step": step, "split": "same", "accuracy": 0.1 * step} for step in (0, 2)]
    (tmp_path / "seed-1.json").write_text(json.dumps({"steps": steps, "curve": curve}))
    (tmp_path / "trl.json").write_text(json.dumps({"missing": "not installed"}))
    scripts["real_model"].draw(tmp_path, tmp_path / "picture.svg")
    assert "seed-1, templates of the training" in (tmp_path / "picture.svg").read_text()


def test_no_problem_is_in_two_files_and_new_templates_are_new(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    for folder in (tmp_path / "a", tmp_path / "b"):
        scripts["word_problems"].make(folder, train=200, test=50)
    rows = {}
    for name in ("train", "same", "new"):
        text = (tmp_path / f"a/{name}.jsonl").read_text()
        assert text == (tmp_path / f"b/{name}.jsonl").read_text()
        rows[name] = [json.loads(line) for line in text.splitlines()]
    assert [len(found) for found in rows.values()] == [200, 50, 50]
    assert len({row["question"] for found in rows.values() for row in found}) == 300
    known, same, new = ({row["template"] for row in found} for found in rows.values())
    assert same <= known
    assert not new & known
