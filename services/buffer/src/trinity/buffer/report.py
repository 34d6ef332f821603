"""Metrics of exploration and evaluation, for the monitor's run `<name>_explorer`."""

import statistics
from collections.abc import Iterable, Sequence

from trinity.buffer.evaluation.tally import Series, Tally
from trinity.buffer.ledger.wire import Entry
from trinity.buffer.operators.pipeline import Pipeline
from trinity.buffer.window.groups import StoredGroup
from trinity.config import Plan
from trinity.data.task_source import TaskMixture
from trinity.runtime.monitor import Monitor

# Metrics of one group's rollouts, by name.
_Values = dict[str, list[float]]


class Reporter:
    """Hears of every group, every ledger entry and every evaluation. Nothing of the run depends on it."""

    def __init__(self, plan: Plan, tasks: TaskMixture | None) -> None:
        self._plan = plan
        self.monitor: Monitor | None = None  # set once it is known where the run continues
        self._tasks = tasks
        self.pipeline: Pipeline | None = None
        self._series = Series()
        self._pending: dict[int, _Values] = {}

    def stored(self, group: StoredGroup, values: dict[str, list[float]]) -> None:
        """`values`: of LogEntry.rollout_values."""
        self._pending[group.ordinal] = self._joined([values])
        if self._tasks is not None:
            self._tasks.observe(group.task_id, group.reward_mean)

    def written(self, entry: Entry) -> None:
        """The groups of a step are known. Those stored before a restart are missing from its rollout metrics."""
        groups = [self._pending.pop(g.ordinal) for g in entry.groups if g.ordinal in self._pending]
        for drop in entry.dropped:
            self._pending.pop(drop.ordinal, None)
        metrics = _rollout_metrics(groups, self._joined(groups))
        metrics["rollout/finished_task_count"] = float(len(entry.groups))
        metrics["rollout/cut_task_count"] = float(len(entry.cut))
        metrics["rollout/model_version"] = max((float(g.newest_version) for g in entry.groups), default=0.0)
        metrics["rollout/staleness/mean"] = statistics.fmean([g.staleness_steps for g in entry.groups] or [0])
        metrics |= self.pipeline.metrics() if self.pipeline is not None else {}
        metrics |= _dropped_metrics(entry)
        metrics["experience_count"] = float(sum(g.num_experiences for g in entry.groups))
        if self.monitor is not None:
            self.monitor.log(metrics, entry.step)

    def _joined(self, groups: Iterable[_Values]) -> _Values:
        """Joins the values of groups, without names that are too many."""
        joined: _Values = {}
        for values in groups:
            for name, numbers in values.items():
                if self._series.admits(name, joined):
                    joined.setdefault(name, []).extend(numbers)
        return joined

    def evaluated(self, tally: Tally) -> None:
        """An evaluation is complete."""
        prefix = "bench" if self._plan.config.mode == "bench" else "eval"
        found = tally.metrics(self._plan.config.monitor.detailed_stats)
        if self.monitor is not None:
            self.monitor.log({f"{prefix}/{tally.taskset}/{name}": v for name, v in found.items()}, tally.step)


def _dropped_metrics(entry: Entry) -> dict[str, float]:
    """Counts the groups dropped since the previous step by reason, and compares their length with the kept ones."""
    found = {"filtered_count": float(len(entry.dropped))}
    for reason in sorted({drop.reason for drop in entry.dropped}):
        lengths = [drop.num_response_tokens for drop in entry.dropped if drop.reason == reason]
        found[f"dropped/{reason}/groups"] = float(len(lengths))
        found[f"dropped/{reason}/response_tokens/mean"] = statistics.fmean(lengths)
    if entry.dropped and entry.groups:
        found["dropped/kept/response_tokens/mean"] = statistics.fmean(g.num_response_tokens for g in entry.groups)
    return found


def _rollout_metrics(groups: Sequence[_Values], joined: _Values) -> dict[str, float]:
    """mean, max, min of every metric over all rollouts, and how rewards differ within groups."""
    means = [statistics.fmean(values["reward"]) for values in groups]
    spreads = [statistics.pstdev(values["reward"]) for values in groups]
    metrics: dict[str, float] = {}
    for name, numbers in joined.items():
        metrics[f"rollout/{name}/mean"] = statistics.fmean(numbers)
        metrics[f"rollout/{name}/max"] = max(numbers)
        metrics[f"rollout/{name}/min"] = min(numbers)
    if means:
        metrics["group_advantages/reward_mean/mean"] = statistics.fmean(means)
        metrics["group_advantages/reward_std/mean"] = statistics.fmean(spreads)
        metrics["group_advantages/skipped_group_ratio"] = sum(s == 0 for s in spreads) / len(spreads)
    return metrics
