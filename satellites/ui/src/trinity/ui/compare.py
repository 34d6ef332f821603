"""Compares runs: their curves, their YAMLs, and the first difference between two."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from trinity.config import flat
from trinity.reading.errors import RunError
from trinity.study import bisect, paired
from trinity.ui import curves, replays, screens
from trinity.ui.places import Places
from trinity.ui.source import Source

Facts = dict[str, Any]

_MOST_RUNS = 8


async def others(places: Places, source: Source) -> Facts:
    """Returns the runs that can be compared with this one, and its replays."""
    found = await asyncio.to_thread(places.find)
    return {
        "others": [(key, one.title) for key, one in found.items() if one is not source and one.folder is not None],
        "replays": await asyncio.to_thread(replays.read, source.folder),
        "command": f"trinity bisect {source.folder} OTHER",
    }


async def overlay(places: Places, source: Source, keys: Sequence[str] | str) -> Facts:
    """Returns the curves of this run and of those with the given keys, and the keys of the YAML in which they differ.

    Of two runs also the first difference as `trinity bisect` finds it. Raises RunError for an unknown run.
    """
    runs = {key: one for key, one in places.find().items() if one is source}
    for key in [keys] if isinstance(keys, str) else keys:
        if (second := places.get(key)) is None:
            raise RunError(f"no run {key} is known here")
        runs[key] = second
    if not 2 <= len(runs) <= _MOST_RUNS:
        raise RunError(f"run: {len(runs) - 1} other runs; choose 1 to {_MOST_RUNS - 1}")
    problems: list[str] = []
    steps, difference, paired_steps = list[int](), None, None
    if len(runs) == 2:
        a, b = (one.job_stage.folder for one in runs.values())
        steps, difference = await screens.or_none(asyncio.to_thread(bisect.compare, a, b), problems) or ([], None)
        if difference is not None:
            with contextlib.suppress(RunError):  # they trained no task in the same step
                paired_steps = await asyncio.to_thread(paired.compare_runs, [(a, b)])
    values = [flat(one.job_stage.config) for one in runs.values()]
    every = sorted(set().union(*values))
    rows = [(name, [one.get(name, "-") for one in values]) for name in every]
    return {
        "titles": [one.title for one in runs.values()],
        "steps": steps,
        "difference": difference,
        "paired": paired_steps,
        "paired_rows": paired_steps.ranges if paired_steps else [],
        "curves": await curves.of_runs(runs),
        "settings": [(name, found) for name, found in rows if len(set(found)) > 1],
        "problems": problems,
        "command": f"trinity bisect {' '.join(str(one.job_stage.folder) for one in list(runs.values())[:2])}",
    }
