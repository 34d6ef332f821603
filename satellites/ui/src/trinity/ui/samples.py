"""Finds samples: the worst of a step, those with a text, each group's spread, and the answer that a task expects."""

import asyncio
import math
import re
import time
from pathlib import Path
from typing import Any

from trinity.reading.errors import RunError
from trinity.study import view
from trinity.study.references import References
from trinity.ui.source import Source

Facts = dict[str, Any]
Row = dict[str, Any]

_HITS = 100
_SEARCH_SECONDS = 5.0
_AROUND = 60  # characters on both sides of a match
_SEARCHED = ("response", "prompt", "task_id")


def worst(rows: list[Row]) -> int | None:
    """Returns the place of the sample with the lowest reward, and of equal ones the lowest advantage."""

    def order(place: int) -> tuple[float, ...]:
        found = (rows[place].get(name) for name in ("reward", "advantage"))
        return tuple(v if isinstance(v, (int, float)) and not math.isnan(v) else math.inf for v in found)

    return min(range(len(rows)), key=order, default=None)


async def newest_worst(source: Source) -> tuple[int, int]:
    """Returns step and place of the worst sample of the newest kept step. Raises RunError if none is kept."""
    rows = await source.rows(None)
    place = worst(rows)
    if place is None:
        raise RunError("no sample is kept")
    return rows[place]["step"], place


def spreads(rows: list[Row]) -> dict[Any, Facts]:
    """Returns the prompt, the least and the greatest reward of each group by its ordinal."""
    found: dict[Any, Facts] = {}
    for row in rows:
        reward = row.get("reward")
        one = found.setdefault(row.get("ordinal"), {"prompt": str(row.get("prompt", "")), "rewards": []})
        one["rewards"] += [reward] if isinstance(reward, (int, float)) else []
    for one in found.values():
        rewards = one.pop("rewards")
        one |= {"least": min(rewards, default=None), "greatest": max(rewards, default=None)}
    return found


async def search(source: Source, text: str) -> Facts:
    """Returns the newest samples with a text in prompt, response or task, whatever its case.

    Stops after _HITS samples or _SEARCH_SECONDS; `steps` are those it searched, newest first.
    """
    if source.folder is None:
        raise RunError("the samples of a run elsewhere are not searched; give --job on a machine that has its folder")
    hits, steps = await asyncio.to_thread(_search, source.folder, text.strip()) if text.strip() else ([], [])
    return {"text": text, "hits": hits, "steps": steps}


def _search(folder: Path, text: str) -> tuple[list[Facts], list[int]]:
    hits: list[Facts] = []
    steps: list[int] = []
    until = time.monotonic() + _SEARCH_SECONDS
    for step, rows in view.stretches(folder, lambda step: step not in steps):
        if rows:
            steps.append(step)
            hits += (_hit(step, place, row, found) for place, row in enumerate(rows) if (found := _find(row, text)))
        if len(hits) >= _HITS or time.monotonic() > until:
            break
    return hits[:_HITS], steps


def _find(row: Row, text: str) -> re.Match[str] | None:
    """Returns the match in the first field that has the text."""
    pattern = re.compile(re.escape(text), re.IGNORECASE)
    return next(filter(None, (pattern.search(str(row.get(name, ""))) for name in _SEARCHED)), None)


def _hit(step: int, place: int, row: Row, found: re.Match[str]) -> Facts:
    return {
        "step": step,
        "index": place,
        "task": row.get("task_id"),
        "reward": row.get("reward"),
        "before": found.string[max(0, found.start() - _AROUND) : found.start()],
        "match": found[0],
        "after": found.string[found.end() : found.end() + _AROUND],
    }


def reference(source: Source, row: Row) -> str | None:
    """Returns the answer that the taskset has for a sample's task; None if it has none, or cannot be read here."""
    found: References = source.cached(("references", ""), lambda: References(source.job_stage.config, source.folder))
    return found.of(row)
