"""Numbers of an evaluation, compared with what they mean: every subset of the rollouts, written out."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from itertools import combinations
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from support.fakes.data.experience import make_group, make_task
from trinity.buffer import servicer
from trinity.buffer.evaluation.tally import Series, Tally, expected_best
from trinity.data.experience import AttemptFailure, Group
from trinity.runtime.errors import FailureCause

pytestmark = pytest.mark.core

values_n = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8)


def group_of(ordinal: int, rewards: list[float], **metrics: list[float]) -> Group:
    task = make_task(ordinal, repeat_times=len(rewards), evaluation_step=10, taskset="sums")
    group = make_group(task)
    experiences = tuple(
        dataclasses.replace(e, reward=rewards[i], metrics={name: values[i] for name, values in metrics.items()})
        for i, e in enumerate(group.experiences)
    )
    return dataclasses.replace(group, experiences=experiences)


def tally_of(*tasks: list[float]) -> Tally:
    tally = Tally(10, "sums", len(tasks))
    for ordinal, rewards in enumerate(tasks, start=1):
        tally.add(group_of(ordinal, rewards))
    return tally


def failure(ordinal: int, attempt: int = 1, final: bool = False) -> AttemptFailure:
    task = make_task(ordinal, evaluation_step=10, max_attempts=3)
    return AttemptFailure(task, attempt, "tester", FailureCause.WORKFLOW_ERROR, "it fails", final, 1.0)


def brute_force(values: list[float], k: int, choose: Callable[..., float] = max) -> float:
    return statistics.fmean(choose(subset) for subset in combinations(values, k))


@given(values=values_n, k=st.integers(1, 8))
def test_the_expected_best_is_the_mean_over_all_subsets(values: list[float], k: int) -> None:
    k = min(k, len(values))
    assert math.isclose(expected_best(values, k), brute_force(values, k), rel_tol=1e-9, abs_tol=1e-9)


@given(values=values_n, k=st.integers(8, 20))
def test_of_no_more_than_k_values_the_best_is_their_maximum(values: list[float], k: int) -> None:
    assert expected_best(values, k) == max(values)


@pytest.mark.parametrize("k", [1, 2, 1024, 2048, 2999])
def test_thousands_of_values_have_an_expected_best(k: int) -> None:
    n = 3000
    expected = k * (n + 1) / (k + 1) - 1  # of the numbers 0 to n - 1
    assert math.isclose(expected_best([float(i) for i in range(n)], k), expected, rel_tol=1e-9)


@given(
    tasks=st.integers(1, 8).flatmap(
        lambda n: st.lists(st.lists(st.floats(-10, 10), min_size=n, max_size=n), min_size=1, max_size=3)
    )
)
def test_every_number_is_what_its_name_says(tasks: list[list[float]]) -> None:
    n = len(tasks[0])
    found = tally_of(*tasks).metrics(detailed=True)
    means = [statistics.fmean(values) for values in tasks]
    expected = {
        f"mean@{n}": statistics.fmean(means),
        "mean": statistics.fmean(means),
        "std": statistics.pstdev(means),
        "max": max(means),
        "min": min(means),
    }
    if n > 1:
        expected[f"std@{n}"] = statistics.fmean(map(statistics.pstdev, tasks))
    for k in (k for k in (2, 4, n) if 1 < k <= n):
        expected[f"best@{k}"] = statistics.fmean(brute_force(values, k) for values in tasks)
        expected[f"worst@{k}"] = statistics.fmean(brute_force(values, k, min) for values in tasks)
    for name, value in expected.items():
        assert math.isclose(found[f"reward/{name}"], value, rel_tol=1e-9, abs_tol=1e-9), name
    assert found.keys() == {*(f"reward/{name}" for name in expected), "finished_task_count", "failed_task_count"}


@pytest.mark.parametrize(
    ("n", "names"),
    [
        (1, ["mean@1"]),
        (2, ["mean@2", "std@2", "best@2", "worst@2"]),
        (6, ["mean@6", "std@6", "best@2", "worst@2", "best@4", "worst@4", "best@6", "worst@6"]),
        (8, ["mean@8", "std@8", "best@2", "worst@2", "best@4", "worst@4", "best@8", "worst@8"]),
    ],
)
def test_the_names_follow_from_the_rollouts_of_a_task(n: int, names: list[str]) -> None:
    found = tally_of([0.5] * n).metrics()
    assert found.keys() == {*(f"reward/{name}" for name in names), "finished_task_count", "failed_task_count"}


def test_one_right_answer_of_four_by_hand() -> None:
    found = tally_of([1, 0, 0, 0], [1, 1, 1, 1]).metrics()
    assert found["reward/mean@4"] == pytest.approx((0.25 + 1) / 2)
    assert found["reward/best@2"] == pytest.approx((0.5 + 1) / 2)  # 3 of the 6 pairs hold the right one
    assert found["reward/worst@2"] == pytest.approx((0 + 1) / 2)
    assert (found["reward/best@4"], found["reward/worst@4"]) == (1, 0.5)


def test_every_metric_of_the_scorer_has_its_numbers() -> None:
    tally = Tally(10, "sums", 1)
    tally.add(group_of(1, [1.25, 0.25], accuracy=[1, 0], format=[0.25, 0.25]))
    found = tally.metrics()
    assert (found["accuracy/mean@2"], found["accuracy/best@2"], found["format/std@2"]) == (0.5, 1, 0)


def test_a_part_of_the_reward_that_is_named_reward_does_not_mix_with_the_whole() -> None:
    tally = Tally(10, "sums", 1)
    tally.add(group_of(1, [1.25, 0.25], reward=[1, 0], format=[0.25, 0.25]))
    found = tally.metrics()
    assert found["reward/mean@2"] == 0.75
    assert "reward/mean@4" not in found


def test_failed_tasks_are_counted_and_change_no_mean() -> None:
    tally = tally_of([1.0, 1.0])
    tally.expected = 3
    for attempt in (1, 2):
        tally.fail(failure(2, attempt))
    assert (tally.complete, tally.metrics()["failed_task_count"]) == (False, 0)
    tally.fail(failure(2, 3))
    tally.fail(failure(3, final=True))
    tally.fail(failure(3))  # too late: it is counted once
    found = tally.metrics()
    assert tally.complete
    assert (found["finished_task_count"], found["failed_task_count"], found["reward/mean@2"]) == (1, 2, 1.0)


def test_an_attempt_that_failed_before_it_succeeded_is_no_failed_task() -> None:
    tally = Tally(10, "sums", 1)
    tally.fail(failure(1))
    tally.add(group_of(1, [1.0]))
    tally.add(group_of(1, [0.0]))  # delivered again: the first counts
    assert tally.metrics() == {"finished_task_count": 1, "failed_task_count": 0, "reward/mean@1": 1.0}


def test_a_taskset_that_failed_whole_has_counts_alone() -> None:
    tally = Tally(10, "sums", 1)
    tally.fail(failure(1, final=True))
    assert tally.metrics(detailed=True) == {"finished_task_count": 0, "failed_task_count": 1}


def test_names_of_metrics_are_bounded_in_an_evaluation_and_in_a_run() -> None:
    """Each experience has its thousand; what is known stays, and the first name too many is warned of."""
    series = Series()
    with capture_logs() as lines:
        for step in range(12):
            tally = Tally(step, "sums", 1, series=series)
            group = group_of(1, [1.0, 0.0, 0.5])
            experiences = tuple(
                dataclasses.replace(one, metrics={"known": 1.0, **{f"{step}/{i}/{n}": 0.0 for n in range(999)}})
                for i, one in enumerate(group.experiences)
            )
            tally.add(dataclasses.replace(group, experiences=experiences))
            assert tally.metrics().keys() >= {"reward/mean@3", "known/mean@3"}
            assert len(tally.values) == ([1002] * 9 + [1000, 2, 2])[step]
    assert [line["event"] for line in lines] == ["buffer.metrics.dropped"]
    assert len(tally_of([1.0] * 64).for_log()) == 16
    tally = Tally(10, "sums", 1)
    tally.add(group_of(1, [1.0, 0.0], **{f"m{n}": [1.0, 0.0] for n in range(50)}))
    assert list(tally.metrics())[:100] == list(tally.for_log())


def test_stats_have_the_newest_evaluations_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tallies = [Tally(step, "sums", 1, kept={f"{step:03}" + "m" * 97: 0.5}) for step in range(10)]
    monkeypatch.setattr(servicer, "_MOST_OF_EVALUATIONS", 600)
    found = servicer._newest_evaluations(SimpleNamespace(finished=tallies), detailed=False)  # type: ignore[arg-type]
    assert [one.step for one in found] == [6, 7, 8, 9]
