"""What the monitor's explorer run is told: of each step's groups, after a restart, and of evaluations."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from support.fakes.data.experience import make_group, make_task
from trinity.buffer.evaluation.tally import Tally
from trinity.buffer.ledger.wire import CutTask, Entry
from trinity.buffer.log.wire import LogEntry
from trinity.buffer.report import Reporter
from trinity.buffer.window.groups import StoredGroup
from trinity.config import make_plan
from trinity.config.load import parse
from trinity.data.experience import Group
from trinity.data.wire import encode_outcome

pytestmark = pytest.mark.core

RUN = """
project: p
name: n
model: {model_path: m, max_prompt_tokens: 16, max_response_tokens: 16}
algorithm: {algorithm_type: grpo, repeat_times: 2}
buffer:
  batch_size: 2
  explorer_input: {taskset: {name: sums, path: d.jsonl}, eval_tasksets: [{name: test, path: d.jsonl}]}
"""


class FakeMonitor:
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.lines.append((step, dict(metrics)))

    def close(self) -> None: ...


def reporter_of(*overrides: str) -> tuple[Reporter, FakeMonitor]:
    reporter = Reporter(make_plan(parse(RUN, overrides=overrides)), None)
    reporter.monitor = monitor = FakeMonitor()
    return reporter, monitor


def group_of(ordinal: int, rewards: list[float], seconds: float = 1.0, version: int = 0, **metrics: float) -> Group:
    group = make_group(make_task(ordinal, repeat_times=len(rewards)), version=version)
    experiences = tuple(
        dataclasses.replace(experience, reward=reward, metrics=dict(metrics))
        for experience, reward in zip(group.experiences, rewards, strict=True)
    )
    return dataclasses.replace(
        group, experiences=experiences, started_at_seconds=1000.0, finished_at_seconds=1000.0 + seconds
    )


def entry(step: int, groups: Sequence[StoredGroup], **fields: Any) -> Entry:
    return Entry("run", step, "fifo", 0.0, groups=tuple(groups), **fields)


def store(reporter: Reporter | None, group: Group) -> StoredGroup:
    """The group is in the log; the member its ledger entry will have. None: it was stored before a restart."""
    entry = LogEntry.parse(encode_outcome(group))
    stored = entry.unchecked_summary(group.task.ordinal)
    if reporter is not None:
        reporter.stored(stored, entry.rollout_values())
    return dataclasses.replace(stored, staleness_steps=stored.staleness(5))


def test_a_step_is_told_with_mean_max_and_min_over_its_rollouts() -> None:
    reporter, monitor = reporter_of()
    members = [
        store(reporter, group_of(1, [1.0, 0.0], seconds=2.0, version=3, response_tokens=10.0)),
        store(reporter, group_of(2, [0.5, 0.5], seconds=4.0, version=4, response_tokens=30.0)),
    ]
    store(reporter, group_of(3, [-9.0, 9.0]))  # of a later step
    reporter.written(entry(5, members, cut=(CutTask(4, ""),)))
    ((step, found),) = monitor.lines
    expected = {
        "rollout/reward/mean": 0.5,
        "rollout/reward/max": 1.0,
        "rollout/reward/min": 0.0,
        "rollout/response_tokens/mean": 20.0,
        "rollout/response_tokens/max": 30.0,
        "rollout/response_tokens/min": 10.0,
        "rollout/time/task_execution/mean": 3.0,
        "rollout/time/task_execution/max": 4.0,
        "rollout/time/task_execution/min": 2.0,
        "rollout/finished_task_count": 2.0,
        "rollout/cut_task_count": 1.0,
        "rollout/model_version": 4.0,
        "rollout/staleness/mean": 0.5,
        "group_advantages/reward_mean/mean": 0.5,
        "group_advantages/reward_std/mean": 0.25,
        "group_advantages/skipped_group_ratio": 0.5,
        "experience_count": 4.0,
        "filtered_count": 0.0,
    }
    assert step == 5
    assert found == pytest.approx(expected)


def test_names_of_metrics_are_bounded_in_a_step() -> None:
    reporter, monitor = reporter_of()
    members = [store(reporter, group_of(o, [1.0, 0.0], **{f"{o}/{n}": 1.0 for n in range(1000)})) for o in (1, 2)]
    reporter.written(entry(1, members))
    ((_, found),) = monitor.lines
    assert sum(name.startswith("rollout/") and name.endswith("/mean") for name in found) == 1002 + 1  # staleness
    assert (found["rollout/1/0/mean"], found["rollout/reward/mean"]) == (1.0, 0.5)
    assert "rollout/2/0/mean" not in found


def test_a_group_is_told_once() -> None:
    reporter, monitor = reporter_of()
    first, second = store(reporter, group_of(1, [1.0, 1.0])), store(reporter, group_of(2, [0.0, 0.0]))
    reporter.written(entry(1, [first]))
    reporter.written(entry(2, [second]))
    assert [(step, line["rollout/reward/mean"]) for step, line in monitor.lines] == [(1, 1.0), (2, 0.0)]


def test_a_part_of_the_reward_that_is_named_reward_does_not_mix_with_the_whole() -> None:
    reporter, monitor = reporter_of()
    reporter.written(entry(1, [store(reporter, group_of(1, [1.25, 0.25], reward=9.0))]))
    ((_, found),) = monitor.lines
    assert (found["rollout/reward/mean"], found["rollout/reward/max"]) == (0.75, 1.25)


def test_groups_of_before_a_restart_are_counted_and_not_averaged() -> None:
    reporter, monitor = reporter_of()
    members = [store(None, group_of(1, [1.0, 1.0], version=2)), store(reporter, group_of(2, [0.0, 0.5], version=1))]
    reporter.written(entry(5, members))
    ((_, found),) = monitor.lines
    assert (found["rollout/finished_task_count"], found["experience_count"]) == (2, 4)
    assert (found["rollout/model_version"], found["rollout/staleness/mean"]) == (2, 2.5)
    assert (found["rollout/reward/mean"], found["group_advantages/skipped_group_ratio"]) == (0.25, 0)


def test_a_step_whose_groups_are_all_of_before_a_restart_has_counts_alone() -> None:
    reporter, monitor = reporter_of()
    reporter.written(entry(5, [store(None, group_of(1, [1.0, 1.0]))]))
    ((_, found),) = monitor.lines
    assert set(found) == {
        "rollout/finished_task_count", "rollout/model_version", "rollout/staleness/mean", "experience_count",
        "filtered_count", "rollout/cut_task_count",
    }  # fmt: skip


@pytest.mark.parametrize(("mode", "prefix"), [("both", "eval"), ("train", "eval"), ("bench", "bench")])
def test_an_evaluation_is_told_under_its_taskset_at_its_step(mode: str, prefix: str) -> None:
    reporter, monitor = reporter_of(f"mode={mode}")
    tally = Tally(30, "test", 1)
    tally.add(group_of(1, [1.0, 0.0]))
    reporter.evaluated(tally)
    ((step, found),) = monitor.lines
    assert step == 30
    assert found == {
        f"{prefix}/test/{name}": value
        for name, value in {
            "reward/mean@2": 0.5, "reward/std@2": 0.5, "reward/best@2": 1, "reward/worst@2": 0,
            "finished_task_count": 1, "failed_task_count": 0,
        }.items()
    }  # fmt: skip


def test_detailed_statistics_are_told_where_they_are_asked_for() -> None:
    reporter, monitor = reporter_of("monitor.detailed_stats=true")
    tally = Tally(30, "test", 2)
    tally.add(group_of(1, [1.0, 0.0]))
    tally.add(group_of(2, [1.0, 1.0]))
    reporter.evaluated(tally)
    ((_, found),) = monitor.lines
    values = {name: found[f"eval/test/reward/{name}"] for name in ("mean", "max", "min", "std")}
    assert values == {"mean": 0.75, "max": 1.0, "min": 0.5, "std": 0.25}


def test_without_a_monitor_nothing_is_told_and_nothing_kept() -> None:
    reporter, _ = reporter_of()
    reporter.monitor = None
    reporter.written(entry(1, [store(reporter, group_of(1, [1.0, 1.0]))]))
    reporter.evaluated(Tally(1, "test", 1))
    reporter.monitor = monitor = FakeMonitor()
    reporter.written(entry(2, [store(reporter, group_of(2, [0.0, 0.0]))]))
    assert [line["rollout/reward/mean"] for _, line in monitor.lines] == [0.0]


def test_what_led_to_a_rollout_is_trained_and_is_none() -> None:
    reporter, monitor = reporter_of()
    group = group_of(1, [0.0, 1.0, 1.0])
    reflection = dataclasses.replace(group.experiences[2], info_json='{"group": "reflect_0"}')
    told = dataclasses.replace(group.experiences[1], info_json='{"distilled": true, "text": "\\"group\\""}')
    group = dataclasses.replace(group, experiences=(group.experiences[0], told, reflection))
    reporter.written(entry(1, [store(reporter, group)]))
    (_, metrics), *_ = monitor.lines
    assert metrics["rollout/reward/mean"] == 0.5
    assert metrics["experience_count"] == 3


@pytest.mark.parametrize("info", ['{"group": "alone"}', '["group"]', '{"group"', "[" * 100_000 + '"group"'])
def test_whatever_an_info_holds_a_step_is_told(info: str) -> None:
    reporter, monitor = reporter_of()
    group = group_of(1, [0.0, 1.0])
    odd = tuple(dataclasses.replace(experience, info_json=info) for experience in group.experiences)
    reporter.written(entry(1, [store(reporter, dataclasses.replace(group, experiences=odd))]))
    assert monitor.lines[0][1]["rollout/reward/mean"] == 0.5
