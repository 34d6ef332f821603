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
from dataclasses import dataclass, replace
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

Pair = tuple[float, float]
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
    def of(cls, first: int, last: int, steps: Sequence[Sequence[Pair]]) -> "Difference":
        """Compares the pairs of each step. Pairs count as independent.

        Unpaired seeds have the same mean in a step, so that `seeds` has the variances within the steps.
        """
        values = [pair for step in steps for pair in step]
        half = None
        if len(values) > 1:
            spread = statistics.variance(other - one for one, other in values)
            half = t_quantile(len(values) - 1) * math.sqrt(spread / len(values))
        within = [
            ((one - _mean(step)[0]), (other - _mean(step)[1])) for step in steps if len(step) > 1 for one, other in step
        ]
        paired = sum((other - one) ** 2 for one, other in within)
        seeds = sum(one**2 + other**2 for one, other in within) / paired if paired > 0 else None
        a, b = _mean(values)
        return cls(first, last, len(values), a, b, statistics.fmean(v - u for u, v in values), half, seeds)


@dataclass(frozen=True)
class Comparison:
    """`over`: tasks or runs, over which intervals are; steps of a trainer's metric have none. `alone`: tasks of the
    common steps that only one run trained. `ranges`: at most 20 rows, of neighbouring steps as one."""

    metric: str
    over: str
    alone: int
    steps: list[Difference]
    ranges: list[Difference]
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
    over = "runs" if len(pairs) > 1 else "tasks" if metric in OF_TASKS else "steps"
    alone = sum(one for _, one in found)
    values = found[0][0] if over != "runs" else _means_of_runs([one for one, _ in found])
    numbers = sorted(values)
    size = math.ceil(len(numbers) / _ROWS)
    parts = [numbers[at : at + size] for at in range(0, len(numbers), size)]

    def of(part: Sequence[int]) -> Difference:
        given = [values[step] for step in part]
        if over == "runs":  # steps of a run depend on each other: a run counts once
            given = [[_mean(run) for run in zip(*given, strict=True)]]
        made = Difference.of(part[0], part[-1], given)
        return replace(made, half=None, seeds=None) if over == "steps" else made

    return Comparison(metric, over, alone, [of([one]) for one in numbers], [of(part) for part in parts], of(numbers))


def _mean(pairs: Sequence[Pair]) -> Pair:
    return statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs)


def _means_of_runs(found: "Sequence[dict[int, list[Pair]]]") -> dict[int, list[Pair]]:
    common = sorted(set.intersection(*(set(one) for one in found)))
    if not common:
        raise RunError("the pairs of runs have no step in common", 2)
    return {step: [_mean(one[step]) for one in found] for step in common}


def _of_tasks(a: Path, b: Path, metric: str) -> tuple[dict[int, list[Pair]], int]:
    """Returns the pairs of each common step, and how many tasks of these steps only one run trained."""
    ones, others = (_tasks(folder, metric) for folder in (a, b))
    steps = {step for step, _ in ones} & {step for step, _ in others}
    for folder, tasks in ((a, ones), (b, others)):
        if not tasks:
            names = sorted({name for line in lines_of_steps(folder / "monitor" / "trainer.jsonl") for name in line})
            losses = [name for name in names if name.endswith("loss")] or names
            raise RunError(f"{folder} has no {metric} of tasks; give --metric, such as {losses[0]}", 2)
    if not steps:
        raise RunError(f"{a} and {b} have no trained step in common", 2)
    pairs: dict[int, list[Pair]] = defaultdict(list)
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
            if not math.isfinite(value):
                continue
            if key not in last or turn >= last[key][0]:
                last[key] = turn, value
        groups = defaultdict(list)
        for (task, _), (_, value) in last.items():
            groups[task].append(value)
        found |= {(step, task): statistics.fmean(values) for task, values in groups.items()}
    return found


def _of_trainer(a: Path, b: Path, metric: str) -> tuple[dict[int, list[Pair]], int]:
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
    found = {one["step"]: float(one[metric]) for one in lines if isinstance(one.get(metric), (int, float))}
    return {step: value for step, value in found.items() if math.isfinite(value)}
