"""`trinity compare`: intervals against numbers that are known, and what pairs the runs."""

import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from trinity.lineage.compare import compare, stage_folder
from trinity.reading.errors import RunError
from trinity.study.paired import Difference, compare_runs, t_quantile

pytestmark = pytest.mark.core


def write_run(
    folder: Path, rewards: dict[tuple[int, str], list[float]], metrics: dict[int, float] | None = None
) -> Path:
    (folder / "buffer").mkdir(parents=True, exist_ok=True)
    (folder / "monitor").mkdir(exist_ok=True)
    rows = [
        {"step": step, "task_id": task, "rollout": rollout, "turn": turn, "reward": value if turn else 0.0,
         "response_tokens": 3}
        for (step, task), values in rewards.items() for rollout, value in enumerate(values) for turn in (0, 1)
    ]  # fmt: skip
    (folder / "buffer/experience_buffer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [{"step": step, "actor/loss": value} for step, value in (metrics or {1: 0.0}).items()]
    (folder / "monitor/trainer.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_quantiles_are_those_of_the_tables() -> None:
    tables = {1: 12.706, 4: 2.776, 10: 2.228, 11: 2.201, 20: 2.086, 30: 2.042, 120: 1.980}
    for freedom, expected in tables.items():
        assert t_quantile(freedom) == pytest.approx(expected, abs=3e-3)


def test_a_difference_and_its_interval() -> None:
    values = [(0.0, 1.0), (1.0, 1.0), (2.0, 4.0), (3.0, 4.0)]  # differences 1, 0, 2, 1
    found = Difference.of(7, 7, [values])
    assert (found.difference, found.pairs) == (1.0, 4)
    assert found.half == pytest.approx(3.182 * math.sqrt(2 / 3 / 4))
    assert found.seeds == pytest.approx((5 / 3 + 3.0) / (2 / 3))
    assert Difference.of(7, 7, [values[:1]]).half is None
    assert Difference.of(7, 7, [[(0.0, 1.0), (1.0, 2.0)]]).seeds is None, "no spread of the differences"


def test_tasks_are_the_pairs_and_the_last_turn_counts(tmp_path: Path) -> None:
    one = {(1, "a"): [0.0, 1.0], (1, "b"): [1.0, 1.0], (2, "c"): [0.0, 0.0], (2, "only"): [9.0]}
    other = {(1, "a"): [1.0, 1.0], (1, "b"): [1.0, 1.0], (2, "c"): [1.0, 0.0], (3, "d"): [5.0]}
    found = compare_runs([(write_run(tmp_path / "a", one), write_run(tmp_path / "b", other))])
    assert [(step.first, step.pairs, step.a, step.difference) for step in found.steps] == [
        (1, 2, 0.75, 0.25),
        (2, 1, 0.0, 0.5),
    ]
    assert (found.over, found.whole.pairs, found.alone) == ("tasks", 3, 1)
    assert found.whole.difference == pytest.approx((0.5 + 0.0 + 0.5) / 3)


def test_a_step_that_was_trained_again_counts_as_trained_last(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", {(1, "a"): [0.0]}), write_run(tmp_path / "b", {(1, "a"): [1.0]})
    first, again = write_run(tmp_path / "c", {(1, "a"): [7.0], (2, "x"): [0.0]}), b
    text = (first / "buffer/experience_buffer.jsonl").read_text()
    (first / "buffer/experience_buffer.jsonl").write_text(text + (again / "buffer/experience_buffer.jsonl").read_text())
    assert compare_runs([(a, first)]).whole.difference == 1.0


def test_pairing_saves_seeds_where_tasks_differ_more_than_runs(tmp_path: Path) -> None:
    """Tasks have a spread of 1, the runs differ by 0.1 with a spread of 0.2: (1 + 1 + 0.04) / 0.04 = 51 seeds."""
    rng = np.random.default_rng(3)
    hard = {(step, f"t{step}/{task}"): rng.normal() for step in range(1, 41) for task in range(32)}
    one = write_run(tmp_path / "a", {key: [value] for key, value in hard.items()})
    other = write_run(tmp_path / "b", {key: [value + 0.1 + 0.2 * rng.normal()] for key, value in hard.items()})
    found = compare_runs([(one, other)])
    assert found.whole.seeds == pytest.approx(51, rel=0.15)
    assert abs(found.whole.difference - 0.1) < (found.whole.half or 0) < 0.02
    assert len(found.ranges) == 20
    pooled = found.ranges[0]
    assert (pooled.first, pooled.last, pooled.pairs) == (1, 2, 64)
    text = compare([one, other])
    assert re.search(r"reward: B - A is \+0\.\d+ ± 0\.01\d* over 1280 pairs of tasks; as precise as \d+ unpaired", text)


def test_a_curve_that_both_runs_follow_saves_no_seeds(tmp_path: Path) -> None:
    """Unpaired seeds follow the curve too."""
    rng = np.random.default_rng(4)
    keys = [(step, f"t{step}/{task}") for step in range(1, 41) for task in range(16)]
    one, other = (
        write_run(tmp_path / name, {key: [key[0] / 10 + 0.1 * rng.normal()] for key in keys}) for name in "ab"
    )
    found = compare_runs([(one, other)])
    assert found.whole.seeds == pytest.approx(1, abs=0.2)


def test_rows_of_several_steps_have_the_interval_of_all_their_tasks(tmp_path: Path) -> None:
    """95 of 100 intervals hold the difference, though most steps have one task alone."""
    rng, held = np.random.default_rng(5), 0
    for _ in range(400):
        values = [[(0.0, float(rng.normal())) for _ in range(size)] for size in (8, *[1] * 9)]
        found = Difference.of(1, 10, values)
        held += abs(found.difference) <= (found.half or 0)
    assert 0.92 < held / 400 < 0.98


def test_of_several_pairs_the_runs_are_the_pairs(tmp_path: Path) -> None:
    pairs = []
    for seed, shift in enumerate((0.0, 1.0, 3.0)):
        one = {(step, "t"): [shift] for step in (1, 2)}
        other = {(step, "t"): [shift + 0.5 + seed * 0.1] for step in (1, 2)}
        pairs.append((write_run(tmp_path / f"a{seed}", one), write_run(tmp_path / f"b{seed}", other)))
    found = compare_runs(pairs)
    assert (found.over, found.whole.pairs, [step.pairs for step in found.steps]) == ("runs", 3, [3, 3])
    assert found.whole.difference == pytest.approx(0.6)
    assert found.whole.half == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert found.whole.seeds is not None
    assert found.whole.seeds > 100


def test_a_trainers_metric_has_an_interval_only_over_runs(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {(1, "t"): [0.0]}, {1: 0.5, 2: 0.25, 3: 1.0})
    b = write_run(tmp_path / "b", {(1, "t"): [0.0]}, {2: 0.75, 3: 1.5, 4: 9.0})
    found = compare_runs([(a, b)], "actor/loss")
    assert [(step.first, step.difference, step.half) for step in found.steps] == [(2, 0.5, None), (3, 0.5, None)]
    assert [(one.first, one.last) for one in found.ranges] == [(2, 2), (3, 3)] and found.whole.half is None
    assert re.search(r"^steps +values +A", compare([a, b], "actor/loss"))
    with pytest.raises(RunError, match=r"has no metric 'actor/lss'; did you mean 'actor/loss'\?"):
        compare_runs([(a, b)], "actor/lss")
    with pytest.raises(RunError, match=r"no metric 'x'; its metrics are in .*jsonl, and reward and response_tokens of"):
        compare_runs([(a, b)], "x")


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", {(1, "t"): [0.0]}), write_run(tmp_path / "b", {(2, "t"): [0.0]})
    with pytest.raises(RunError, match="no trained step in common"):
        compare_runs([(a, b)])
    c = write_run(tmp_path / "c", {(1, "u"): [0.0]})
    with pytest.raises(RunError, match="trained no task in the same step: they are no pair"):
        compare_runs([(a, c)])
    with pytest.raises(RunError, match="a is given twice: pairs that share a run"):
        compare([a, b, a, c])
    sft = write_run(tmp_path / "sft", {}, {1: 0.5, 2: float("nan")})
    with pytest.raises(RunError, match="sft has no reward of tasks; give --metric, such as actor/loss"):
        compare([sft, sft])
    assert compare_runs([(sft, sft)], "actor/loss").whole.pairs == 1, "a number that is not finite is none"
    with pytest.raises(RunError, match="3 folders are no pairs"):
        compare([a, b, c])
    with pytest.raises(RunError, match=r"no folder .*/nothing; give the folder of a job or of a stage"):
        compare([tmp_path / "nothing", a])
    with pytest.raises(RunError, match="no step was trained in it"):
        compare([tmp_path, a / "monitor"])
    assert stage_folder(tmp_path / "a") == a
    two = tmp_path / "job"
    write_run(two / "rft", {(1, "t"): [0.0]})
    assert stage_folder(two) == two / "rft"
    write_run(two / "sft", {(1, "t"): [0.0]})
    os.utime(two / "sft/monitor/trainer.jsonl", (1, 1))
    assert stage_folder(two) == two / "rft", "the stage that trained last, as of other commands"
