"""Compares two runs: the first difference, and their curves."""

import asyncio
from pathlib import Path
from typing import Any

from trinity.reading import bisect, results, series
from trinity.reading.errors import RunError
from trinity.ui import charts, replays, screens
from trinity.ui.places import Places
from trinity.ui.source import UNREADABLE, Source

Facts = dict[str, Any]

_STEPS = 1000
_CURVES = ("sample/reward_mean", "sample/staleness_mean", "actor/entropy", "actor/grad_norm", "time/step",
           "perf/tokens_per_second")  # fmt: skip


async def others(places: Places, source: Source) -> Facts:
    """Returns the runs that can be compared with this one, and its replays."""
    found = await asyncio.to_thread(places.find)
    return {
        "others": [(key, one.title) for key, one in found.items() if one is not source and one.folder is not None],
        "replays": await asyncio.to_thread(replays.read, source.folder),
        "command": f"trinity bisect {source.folder} OTHER",
    }


async def compare(places: Places, source: Source, other: str) -> Facts:
    """Returns the first difference as `trinity bisect` finds it, and the curves of both runs.

    Raises RunError without another run.
    """
    second = places.get(other)
    if second is None:
        raise RunError(f"no run {other} is known here")
    a, b = source.job_stage.folder, second.job_stage.folder
    problems: list[str] = []
    steps, difference = await screens.or_none(asyncio.to_thread(bisect.compare, a, b), problems) or ([], None)
    return {
        "other": other,
        "second": second.title,
        "steps": steps,
        "difference": difference,
        "curves": await asyncio.to_thread(_curves, a, b),
        "evaluations": await asyncio.to_thread(_evaluations, a, b),
        "problems": problems,
        "command": f"trinity bisect {a} {b}",
    }


def _curves(a: Path, b: Path) -> list[Facts]:
    """Returns metrics that both trainers measured."""
    runs = [series.read(folder, "trainer", _STEPS) for folder in (a, b)]
    loss = [name for name in (runs[0][-1] if runs[0] else ()) if name.endswith("_loss")]
    found = []
    for name in (*_CURVES[:1], *loss, *_CURVES[1:]):
        pair = [series.values(lines, name) for lines in runs]
        if all(pair):
            found.append(_pair(name, *pair))
    return found


def _evaluations(a: Path, b: Path) -> list[Facts]:
    """Returns evaluation curves that both runs have."""
    both = []
    for folder in (a, b):
        try:
            found = results.collect([folder], results.METRICS)
        except UNREADABLE:  # none was made
            return []
        both.append({f"{one.taskset}: {one.metric}": [value for _, value in one.points] for one in found})
    return [_pair(name, both[0][name], both[1][name]) for name in both[0] if name in both[1]]


def _pair(name: str, a: list[float], b: list[float]) -> Facts:
    return {
        "name": name,
        "a": a[-1],
        "b": b[-1],
        "curve_a": charts.sparkline(a, name),
        "curve_b": charts.sparkline(b, name),
    }
