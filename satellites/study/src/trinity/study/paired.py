"""Differences of two runs by step, with paired intervals (`trinity compare`, the page of two runs).

Runs are paired where they trained the same tasks: forks of one step, or runs of the same data and seed. Each task is
then a pair, so the spread between tasks cancels. Of one pair of runs the interval is over its tasks, of several pairs
over the pairs. Two unpaired runs would need (Var A + Var B) / Var(B - A) times as many seeds for an interval as narrow
(variance reduction by common random numbers: Law, Simulation Modeling and Analysis, section 11.2).
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from trinity.config.errors import did_you_mean
from trinity.reading.errors import RunError
from trinity.study.bisect import lines_of_steps
from trinity.study.view import stretches

OF_TASKS = ("reward", "response_tokens")
_ROWS = 20
_LEVEL = 0.95
# Quantiles of Student's t for 95 %, by degrees of freedom from 1; above them the expansion is exact to 0.1 %.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

Tasks = dict[tuple[int, str], float]  # by step and task: the group's mean


@dataclass(frozen=True)
class Difference:
    """B - A over some steps. `pairs`: tasks, or pairs of runs; `half`: of the interval, None for fewer than two pairs.

    `seeds`: how many unpaired seeds of each run would give an interval as narrow; None if that is not defined.
    """

    first: int
    last: int
    pairs: int
    a: float
    b: float
    difference: float
    half: float | None
    seeds: float | None

    @classmethod
    def of(cls, first: int, last: int, values: Sequence[tuple[float, float]]) -> "Difference":
        ones, others = zip(*values, strict=True)
        differences = [other - one for one, other in values]
        mean, half, seeds = statistics.fmean(differences), None, None
        if len(values) > 1:
            paired = statistics.variance(differences)
            half = t_quantile(len(values) - 1) * math.sqrt(paired / len(values))
            unpaired = statistics.variance(ones) + statistics.variance(others)
            seeds = unpaired / paired if paired > 0 else None
        return cls(first, last, len(values), statistics.fmean(ones), statistics.fmean(others), mean, half, seeds)


@dataclass(frozen=True)
class Comparison:
    """`over`: tasks or runs, over which intervals are. `alone`: tasks of the common steps that only one run trained."""

    metric: str
    over: str
    alone: int
    steps: list[Difference]
    whole: Difference


def t_quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t (Abramowitz and Stegun, 26.7.5, above 10 degrees of freedom)."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = NormalDist().inv_cdf((1 + _LEVEL) / 2)
    one, two = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + one / freedom + two / freedom**2


def compare_runs(pairs: Sequence[tuple[Path, Path]], metric: str = "reward") -> Comparison:
    """Compares pairs of stage folders. Raises RunError if they have no step, or no task, in common."""
    if metric in OF_TASKS:
        found = [_of_tasks(a, b, metric) for a, b in pairs]
    else:
        found = [_of_trainer(a, b, metric) for a, b in pairs]
    if len(found) == 1:
        values, alone = found[0]
        over = "tasks" if metric in OF_TASKS else "steps"
    else:
        values, alone = _means_of_runs([one for one, _ in found]), sum(alone for _, alone in found)
        over = "runs"
    steps = [Difference.of(step, step, values[step]) for step in sorted(values)]
    together = [pair for step in sorted(values) for pair in values[step]]
    if over == "runs":  # steps of a run depend on each other: a run counts once
        together = [
            (statistics.fmean(a for a, _ in run), statistics.fmean(b for _, b in run))
            for run in zip(*(values[step] for step in sorted(values)), strict=True)
        ]
    return Comparison(metric, over, alone, steps, Difference.of(steps[0].first, steps[-1].last, together))


def _means_of_runs(found: "Sequence[dict[int, list[tuple[float, float]]]]") -> dict[int, list[tuple[float, float]]]:
    common = sorted(set.intersection(*(set(one) for one in found)))
    if not common:
        raise RunError("the pairs of runs have no step in common", 2)
    mean = lambda pairs: (statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs))  # noqa: E731
    return {step: [mean(one[step]) for one in found] for step in common}


def _of_tasks(a: Path, b: Path, metric: str) -> tuple[dict[int, list[tuple[float, float]]], int]:
    """Returns the pairs of each common step, and how many tasks of these steps only one run trained."""
    ones, others = (_tasks(folder, metric) for folder in (a, b))
    steps = {step for step, _ in ones} & {step for step, _ in others}
    if not steps:
        raise RunError(f"{a} and {b} have no trained step in common", 2)
    pairs: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for key in sorted(ones.keys() & others.keys()):
        pairs[key[0]].append((ones[key], others[key]))
    if not pairs:
        raise RunError(
            f"{a} and {b} trained no task in the same step: they are no pair; `trinity fork` makes one of a run", 2
        )
    alone = sum(step in steps for step, _ in ones.keys() ^ others.keys())
    return dict(pairs), alone


def _tasks(folder: Path, metric: str) -> Tasks:
    """Returns the mean over the rollouts of every group. The last turn of a rollout has its reward."""
    found: Tasks = {}
    seen: set[int] = set()
    for step, rows in stretches(folder, lambda step: step not in seen):
        seen.add(step)
        last: dict[tuple[str, Any], tuple[Any, float]] = {}
        for row in rows:
            try:
                key, turn, value = (str(row["task_id"]), row["rollout"]), row["turn"], float(row[metric])
            except (KeyError, TypeError, ValueError):
                continue
            if key not in last or turn >= last[key][0]:
                last[key] = turn, value
        groups = defaultdict(list)
        for (task, _), (_, value) in last.items():
            groups[task].append(value)
        found |= {(step, task): statistics.fmean(values) for task, values in groups.items()}
    return found


def _of_trainer(a: Path, b: Path, metric: str) -> tuple[dict[int, list[tuple[float, float]]], int]:
    ones, others = (_metric(folder, metric) for folder in (a, b))
    for folder, values in ((a, ones), (b, others)):
        if not values:
            file = folder / "monitor" / "trainer.jsonl"
            names = {*OF_TASKS, *(name for line in lines_of_steps(file) for name in line)}
            hint = did_you_mean(metric, names, f"its metrics are in {file}, and {' and '.join(OF_TASKS)} of tasks")
            raise RunError(f"{folder} has no metric {metric!r}; {hint}", 2)
    common = ones.keys() & others.keys()
    if not common:
        raise RunError(f"{a} and {b} have no trained step in common", 2)
    return {step: [(ones[step], others[step])] for step in common}, 0


def _metric(folder: Path, metric: str) -> dict[int, float]:
    lines = lines_of_steps(folder / "monitor" / "trainer.jsonl")
    return {one["step"]: float(one[metric]) for one in lines if isinstance(one.get(metric), (int, float))}


def in_ranges(found: Comparison, most: int = _ROWS) -> list[Difference]:
    """Returns at most `most` rows: neighbouring steps as one with all their tasks, or some of the steps of runs."""
    size = math.ceil(len(found.steps) / most)
    if found.over != "tasks":
        return found.steps[size - 1 :: size]
    return [_pooled(found.steps[at : at + size]) for at in range(0, len(found.steps), size)]


def _pooled(steps: Sequence[Difference]) -> Difference:
    """Returns several steps as one. Tasks of different steps count as independent."""
    pairs = sum(one.pairs for one in steps)
    weigh = lambda name: sum(getattr(one, name) * one.pairs for one in steps) / pairs  # noqa: E731
    known = [one for one in steps if one.half is not None and one.half > 0]
    half = math.sqrt(sum((one.half or 0.0) ** 2 * one.pairs**2 for one in steps)) / pairs if known else None
    seeds = [one.seeds for one in steps if one.seeds is not None]
    mean = statistics.fmean(seeds) if seeds else None
    return Difference(steps[0].first, steps[-1].last, pairs, weigh("a"), weigh("b"), weigh("difference"), half, mean)
