"""The results of one evaluation taskset at one step, and their metrics."""

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import structlog

from trinity.data.experience import MOST_METRICS, AttemptFailure, Group
from trinity.runtime.metrics import Counter

log = structlog.get_logger(__name__)

DROPPED = Counter("trinity_buffer_metrics_dropped_total", "Metrics of groups beyond the names that a run may have")

_AT_ONCE = MOST_METRICS + 2  # with the reward and the time
_LOGGED = 100
_OF_A_RUN = 10_000  # games against older versions have one name for each version
_RECORDED = ("step", "taskset", "oldest_version", "newest_version", "tokens", "kept")


class Series:
    """The names of metrics in the groups of a run: at most 1,002 in a group, step or evaluation, and 10,000 in all.

    Explorers choose the names, and each is a series of the monitor. Later names are dropped and counted.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._has_warned = False

    def admits(self, name: str, among: Collection[str]) -> bool:
        """Returns False for a name that is one too many. `among`: those of the same group, step or evaluation."""
        if name in among:
            return True
        if len(among) < _AT_ONCE and (name in self._known or len(self._known) < _OF_A_RUN):
            self._known.add(name)
            return True
        DROPPED.inc()
        if not self._has_warned:
            self._has_warned = True
            advice = "have workflows and scorers report fewer names, or revoke the explorer that makes them up"
            log.warning("buffer.metrics.dropped", name=name, most=_AT_ONCE, most_of_run=_OF_A_RUN, advice=advice)
        return False


@dataclass
class Tally:
    """Results of one taskset at one step, so far.

    `kept`: its metrics, once results are gone. `blobs`: owner and key of those with results, and their size in bytes.
    `first_task`, `first_result`: sequences in their streams; 0 if unknown.
    """

    step: int
    taskset: str
    expected: int
    ended: set[str] = field(default_factory=set)
    failures: dict[str, int] = field(default_factory=dict)
    failed_tasks: int = 0
    oldest_version: int = -1
    newest_version: int = -1
    tokens: int = 0  # that the policy sampled
    kept: dict[str, float] | None = None
    blobs: dict[tuple[str, str], int] = field(default_factory=dict)
    first_task: int = 0
    first_result: int = 0
    series: Series = field(default_factory=Series)
    # metric -> one list of values per task, a value per rollout
    values: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def complete(self) -> bool:
        return self.missing == 0

    @property
    def missing(self) -> int:
        """Tasks without a result, by the size that the taskset has now."""
        return 0 if self.kept is not None else max(0, self.expected - len(self.ended))

    def keep(self, detailed: bool) -> None:
        """Keep the metrics in place of the results."""
        self.kept = self.metrics(detailed)
        self.values.clear()
        self.ended.clear()
        self.failures.clear()

    def to_record(self) -> dict[str, Any]:
        """The record of a kept tally, for JSON."""
        return {name: getattr(self, name) for name in _RECORDED}

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Tally":
        """Inverse of `to_record`. Raises KeyError, TypeError, ValueError or OverflowError for others."""
        return cls(
            step=int(record["step"]),
            taskset=str(record["taskset"]),
            expected=0,
            oldest_version=int(record["oldest_version"]),
            newest_version=int(record["newest_version"]),
            tokens=int(record["tokens"]),
            kept={str(name): float(value) for name, value in dict(record["kept"]).items()},
        )

    def add(self, group: Group) -> None:
        self.tokens += group.sampled_tokens
        if group.task.task_id in self.ended:
            return
        self.ended.add(group.task.task_id)
        oldest, newest = group.versions
        self.oldest_version = oldest if self.oldest_version < 0 else min(oldest, self.oldest_version)
        self.newest_version = max(newest, self.newest_version)
        by_metric: dict[str, list[float]] = defaultdict(list)
        for experience in group.experiences:
            by_metric["reward"].append(experience.reward)
            for name, value in experience.metrics.items():
                if name != "reward":  # a part of the reward may have the name of the whole
                    by_metric[name].append(value)
        for name, values in by_metric.items():
            if self.series.admits(name, self.values):
                self.values[name].append(values)

    def fail(self, failure: AttemptFailure) -> None:
        task = failure.task
        if task.task_id in self.ended:
            return
        self.failures[task.task_id] = self.failures.get(task.task_id, 0) + 1
        if failure.final or self.failures[task.task_id] >= task.max_attempts:
            self.ended.add(task.task_id)
            self.failed_tasks += 1

    def metrics(self, detailed: bool = False) -> dict[str, float]:
        """Per metric over tasks and their n rollouts: mean@n, and for n > 1 std@n, best@k, worst@k; task counts.

        best@k and worst@k are expectations over k of a task's n rollouts drawn without replacement, k = 2, 4, ..., n.
        `detailed` adds mean, max, min and std over the tasks' means.
        """
        if self.kept is not None:
            return self.kept
        result = {
            "finished_task_count": float(len(self.ended) - self.failed_tasks),
            "failed_task_count": float(self.failed_tasks),
        }
        for name, tasks in self.values.items():
            n = max(len(values) for values in tasks)
            means = [statistics.fmean(values) for values in tasks]
            result[f"{name}/mean@{n}"] = statistics.fmean(means)
            if n > 1:
                result[f"{name}/std@{n}"] = statistics.fmean(statistics.pstdev(values) for values in tasks)
            for k in _sizes(n):
                result[f"{name}/best@{k}"] = statistics.fmean(expected_best(values, k) for values in tasks)
                result[f"{name}/worst@{k}"] = -statistics.fmean(expected_best([-v for v in v_n], k) for v_n in tasks)
            if detailed:
                result |= {f"{name}/mean": statistics.fmean(means), f"{name}/std": statistics.pstdev(means)}
                result |= {f"{name}/max": max(means), f"{name}/min": min(means)}
        return result

    def for_log(self) -> dict[str, float]:
        """The first metrics. The monitor has all."""
        return dict(islice(self.metrics().items(), _LOGGED))


def expected_best(values: Sequence[float], k: int) -> float:
    """Expected maximum of k of the n values drawn without replacement: sum_i v_(i) C(i - 1, k - 1) / C(n, k)."""
    n = len(values)
    if k >= n:
        return max(values)
    weight, expected = k / n, 0.0  # a ratio of the binomials, which do not fit into a float
    for i, value in zip(range(n - 1, -1, -1), sorted(values, reverse=True), strict=True):
        expected += weight * value
        weight *= (i - k + 1) / max(1, i)
    return expected


def _sizes(n: int) -> list[int]:
    """2, 4, 8, ... below n, and n itself."""
    powers = [2**e for e in range(1, 31) if 2**e < n]
    return [*powers, n] if n > 1 else []
