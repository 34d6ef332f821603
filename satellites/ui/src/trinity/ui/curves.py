"""Curves of metrics over steps, which static/curves.js draws with uPlot.

A page holds the curves that it opens with, so that it needs no second request and works from disk; the browser asks
for other metrics, for newer steps, and for the single steps of a part that the reader zooms into.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

from trinity.reading.errors import RunError
from trinity.reading.series import BUSY, Curves
from trinity.ui.source import Source

Facts = dict[str, Any]

_OPENED = (  # the first pattern of each line with a match, and its first match; of evaluations and GPUs several
    ("sample/reward_mean", "rollout/reward/mean"),
    (r"eval/.+/accuracy/mean@\d+", r"eval/.+/success/mean@\d+", r"eval/.+/reward/mean@\d+"),
    ("actor/kl", "critic/kl", "actor/ppo_kl"),
    ("actor/mismatch/kernel_kl",),
    ("actor/entropy",),
    ("rollout/response_tokens/mean", "sample/response_tokens"),
    (".+_loss",),
    ("actor/grad_norm",),
    ("actor/pg_clipfrac",),
    ("perf/tokens_per_second",),
    ("sample/staleness_mean",),
    (r"perf/gpu_use/\d+",),
    (re.escape(BUSY),),
)
_MOST = {"eval/": 4, "perf/gpu_use/": 8}  # curves of these kinds; one of each other
_MOST_NAMES = 24  # of one request
_MOST_POINTS = 400  # of a curve: a chart has no more pixels
_LAST = 10**18


def opened(names: Sequence[str]) -> list[str]:
    """Returns the metrics that a page opens with."""
    found: list[str] = []
    for patterns in _OPENED:
        matches = next(filter(None, ([n for n in names if re.fullmatch(p, n)] for p in patterns)), [])
        found += matches[: next((most for kind, most in _MOST.items() if patterns[0].startswith(kind)), 1)]
    return found


def collect(curves: Curves, names: Sequence[str] = (), first: int = 0, last: int = _LAST) -> Facts:
    """Returns the names of all metrics, and the points of `names`, or of the first metrics that a page shows.

    Raises RunError for too many names.
    """
    if len(names) > _MOST_NAMES:
        raise RunError(f"name: {len(names)} metrics; ask for {_MOST_NAMES} at most")
    known = curves.names()
    wanted = [name for name in names if name in known] if names else opened(known)
    return {"names": known, "series": {name: curves.points(name, first, last, _MOST_POINTS) for name in wanted}}


async def of_runs(runs: dict[str, Source]) -> list[Facts]:
    """Returns the values of the curves of a page: for each run its key, its title and the points as JSON."""
    found = []
    for key, source in runs.items():
        points = await asyncio.to_thread(collect, source.curves)
        found.append({"key": key, "title": source.title, "json": json.dumps(points, separators=(",", ":"))})
    return found
