"""The history of weight versions and processes, from the logs and the account of devices, also of a stopped run.

Logs that were rotated away are missing. A process without devices has no account, and so no lane.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity.reading import series
from trinity.reading.accounts import lives
from trinity.reading.errors import RunError
from trinity.reading.wire import waiting_after
from trinity.study.log_entry import Entry
from trinity.ui import charts, journeys, screens
from trinity.ui.charts import Span
from trinity.ui.source import UNREADABLE, Source

Facts = dict[str, Any]

_STAGED, _REJECTED, _ROLLED_BACK = "sync.version.staged", "sync.version.rejected", "sync.run.rolled_back"
_PINS = ("sync.version.pinned", "sync.version.unpinned")
_OF_VERSIONS = (_STAGED, _REJECTED, journeys.LIVE, journeys.LOADED)
_MOST_VERSIONS = 200
_MOST_STEPS = 200
_ALL_STEPS = 100_000  # of an axis in steps
_SEARCHED_STEPS = 4  # for the newest group of an explorer


@dataclass
class _Past:
    """The log records of one version: Unix times, 0 without a record."""

    number: int
    step: int | None = None
    staged: float = 0.0
    live: float = 0.0
    rejected: float = 0.0
    reason: str = ""
    loads: list[Entry] = field(default_factory=list)

    def read(self, one: Entry) -> None:
        """Adds one line about this version."""
        event = one.fields["event"]
        step = one.fields.get("step")
        self.step = step if isinstance(step, int) else self.step
        if event == journeys.LOADED:
            self.loads.append(one)
        elif event == journeys.LIVE:
            self.live = one.order()
        elif event == _STAGED:
            self.staged = one.order()
        else:
            self.rejected, self.reason = one.order(), str(one.fields.get("reason", ""))

    def spans(self, until: float) -> list[Span]:
        """`until`: when the next version became LIVE."""
        found = [Span("waited", self.staged, max(self.staged, self.live or self.rejected))] if self.staged else []
        found += [Span("sampled", self.live, max(self.live, until))] if self.live else []
        found += [Span("failed", self.rejected, self.rejected)] if self.rejected else []
        return found + [Span("published", one.order(), one.order()) for one in self.loads]


async def versions(source: Source, by: str) -> Facts:
    """Returns the weight versions, newest first, and a lane for each in the logs. `by`: as `_drawn`.

    Raises RunError if there are neither.
    """
    problems: list[str] = []
    listed = await screens.or_none(source.versions(), problems)
    past = await asyncio.to_thread(_versions, source.folder, by)
    if listed is None and not past["pasts"]:
        raise RunError("; ".join(problems))
    return {
        "versions": listed or [],
        **past,
        "problems": problems if source.is_live else [],
        "command": f"trinity weights list {source.option}"
        if source.is_live
        else f"trinity log sync {source.option_of_status}",
    }


def _versions(folder: Path | None, by: str) -> Facts:
    entries = journeys.log_events(folder, (*_OF_VERSIONS, _ROLLED_BACK, *_PINS))
    found: dict[int, _Past] = {}
    for one in entries:
        number = one.fields.get("version")
        if isinstance(number, int) and one.fields["event"] in _OF_VERSIONS:
            found.setdefault(number, _Past(number)).read(one)
    newest = [found[number] for number in sorted(found)][-_MOST_VERSIONS:]
    rows, until = [], entries[-1].order() if entries else 0.0
    for past in reversed(newest):
        rows.append((past, past.spans(until)))
        until = past.live or until
    return {
        **_drawn("pasts", rows, folder, by),
        "pinned_by": _pinned_by(entries),
        "rollbacks": [(one.order(), one.fields) for one in entries if one.fields["event"] == _ROLLED_BACK],
    }


def _drawn(name: str, rows: Sequence[tuple[Any, list[Span]]], folder: Path | None, by: str) -> Facts:
    """Returns the lanes of the rows as `name`, and their axis: in steps if `by` is "step", else in time."""
    whole = [span for _, spans in rows for span in spans]
    wanted = by == "step"
    ends = [
        (line["step"], float(end))
        for line in series.read(folder, "trainer", _ALL_STEPS if wanted else 1)
        if isinstance(end := line.get("time"), (int, float)) and math.isfinite(end)
    ]
    in_steps = wanted and bool(ends)
    alive = [span for span in whole if span.css == "alive"]
    axis = charts.StepAxis(whole, ends) if in_steps else charts.Axis(whole, alive)
    return {
        name: [(row, charts.lane(spans, axis)) for row, spans in rows],
        "axis": {"by": "step" if in_steps else "time", "choices": ("time", "step") if ends else ()},
        "scale": charts.scale(axis),
        "seconds": axis.seconds,
        "pauses": axis.pauses,
    }


def _pinned_by(entries: Sequence[Entry]) -> dict[int, str]:
    """Returns by whom each version was last pinned, as logged: the name of a certificate, or a role."""
    found: dict[int, str] = {}
    for one in entries:
        number = one.fields.get("version")
        if isinstance(number, int) and one.fields["event"] in _PINS:
            found[number] = str(one.fields.get("by", "")) if one.fields["event"] == _PINS[0] else ""
    return found


async def version(source: Source, number: int) -> Facts:
    """Returns transports and canary of one version, and the effect of a rollback to it."""
    found, problems = await source.version(number), list[str]()
    pins = await asyncio.to_thread(journeys.log_events, source.folder, _PINS)
    usable = found["state"] == "RETIRED" and not found["files_gone"]
    return {
        "number": number,
        "version": found,
        "pinned_by": _pinned_by(pins).get(number),
        "rollback": await _rollback(source, number, problems) if usable else None,
        "problems": problems,
        "command": f"trinity weights show {number} {source.option}",
    }


async def _rollback(source: Source, number: int, problems: list[str]) -> Facts | None:
    """Returns versions and steps that a rollback withdraws, and groups that its fence drops.

    None without such versions.
    """
    newer = [one for one in await source.versions() if one.version > number and one.state != "REJECTED"]
    if not newer:
        return None
    counts = await screens.or_none(source.counts(), problems)
    return {
        "versions": [one.version for one in reversed(newer)],
        "steps": max(one.step for one in newer),
        "groups": waiting_after(counts, number) if counts is not None else None,
        "command": f"trinity weights rollback {number} {source.option}",
    }


async def fleet(source: Source, by: str) -> Facts:
    """Returns processes, explorers and providers of a live run, and the history of processes with devices. `by`: as
    `_drawn`.

    Raises RunError for a stopped run without an account of its devices.
    """
    found = await source.status()
    past = await asyncio.to_thread(_fleet, source.folder, by)
    if found is None and not past["lanes"]:
        raise RunError("the run does not live: its processes are gone; trinity log shows what they said")
    problems: list[str] = []
    return {
        "status": found,
        "newest": (await screens.or_none(_newest_groups(source), problems) or {}) if found else {},
        **past,
        "problems": problems,
        "command": f"trinity status {source.option_of_status}" if found else f"trinity cost {source.option}",
    }


async def _newest_groups(source: Source) -> dict[str, tuple[int, int]]:
    """Returns (step, ordinal) of the newest trained group of each explorer, within the last steps; "" is the newest of
    all.

    Raises RunError if the buffer of the run cannot be read.
    """
    newest = (await source.counts())["ledger_step"]
    found: dict[str, tuple[int, int]] = {}
    for step in range(newest, max(0, newest - _SEARCHED_STEPS), -1):
        groups = (await source.entry(step))["groups"]
        if groups:
            found.setdefault("", (step, groups[-1]["ordinal"]))
        for ordinal, made in (await screens.or_none(source.attempts(step), []) or {}).items():
            found.setdefault(made["explorer"], (step, ordinal))
    return found


def _fleet(folder: Path | None, by: str) -> Facts:
    """Returns a lane for each process with devices: its lives, the work of the trainer, loads of weights."""
    loads = journeys.log_events(folder, (journeys.LOADED,))
    trained = _steps(folder)
    rows = []
    for watch in _watches(folder):
        alive = [Span("alive", life.began, life.ended) for life in watch.lives]
        died = [Span("failed", life.ended, life.ended) for life in watch.lives if life.how == "died"]
        inner = trained if watch.service == "trainer" else [
            Span("published", one.order(), one.order()) for one in loads if one.process == watch.name
        ]  # fmt: skip
        inner = [span for span in inner if watch.began <= span.begin and span.end <= watch.ended]
        rows.append((watch, [*alive, *inner, *died]))
    return _drawn("lanes", rows, folder, by)


def _watches(folder: Path | None) -> Sequence[lives.Watch]:
    try:
        return lives.read(folder) if folder is not None else []
    except UNREADABLE:
        return []


def _steps(folder: Path | None) -> list[Span]:
    """Returns spans of the newest steps: the trainer waits, then trains."""
    found = []
    for line in series.read(folder, "trainer", _MOST_STEPS):
        end, works, waits = (line.get(name) for name in ("time", "time/step", "time/wait"))
        if isinstance(end, (int, float)) and isinstance(works, (int, float)):
            begin = end - works
            waited = waits if isinstance(waits, (int, float)) else 0.0
            found += [Span("waited", begin - waited, begin), Span("trained", begin, end)]
    return found
