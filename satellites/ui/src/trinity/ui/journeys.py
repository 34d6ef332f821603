"""The journey of tasks: attempts, group, step, gradient, weights.

The log of groups has the attempt, the explorer and the times of a group. It is released some time after a checkpoint;
the page then reports unknown times. Failed attempts, and when weights became LIVE, are in the logs of the processes.
"""

import asyncio
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from trinity.reading import series
from trinity.reading.tail import GrowingFile
from trinity.study.log_entry import Entry, parse
from trinity.ui import charts, screens
from trinity.ui.charts import Span
from trinity.ui.source import UNREADABLE, Source

Facts = dict[str, Any]

_MOST_BYTES = 32 << 20  # of each log file, from its end
_LEFT_OUT = ("nats", "environment")  # text, and what environments say; explorers have any other name
FAILED = "explorer.attempt.failed"
LIVE, LOADED = "sync.version.live", "explorer.weights.loaded"


async def lanes(source: Source, number: int) -> Facts:
    """Returns a lane for each group of a step: sampled, waiting for the batch, trained.

    Raises RunError without such an entry.
    """
    entry = await source.entry(number)
    problems: list[str] = []
    attempts = await screens.or_none(source.attempts(number), problems) or {}
    trained = await asyncio.to_thread(_training, source.folder, number)
    written = Span("waited", entry["written_at_seconds"], entry["written_at_seconds"])
    rows = []
    for group in entry["groups"]:
        spans = [*_sampled(attempts.get(group["ordinal"]), written.begin), *trained]
        rows.append((group, attempts.get(group["ordinal"]), spans))
    axis = _axis([span for _, _, spans in rows for span in spans])
    return {
        "number": number,
        "entry": entry,
        "lanes": [(group, made, charts.lane(spans, axis)) for group, made, spans in rows],
        "seconds": axis.seconds,
        "pauses": axis.pauses,
        "problems": problems,
        "command": f"trinity batch show {number} {source.option}",
    }


async def task(source: Source, ordinal: int) -> Facts:
    """Returns the state of one task, its attempts with causes, and its samples.

    Raises RunError if no record names it.
    """
    problems: list[str] = []
    await screens.or_none(source.counts(), problems)
    fate, step = source.audit.fate(ordinal)
    letter = await screens.or_none(source.letter(ordinal), problems) if fate == "dead" else None
    group, made, rows = None, None, []
    if fate == "trained" and step is not None:
        entry = await source.entry(step)
        group = next(one for one in entry["groups"] if one["ordinal"] == ordinal)
        made = (await screens.or_none(source.attempts(step), problems) or {}).get(ordinal)
        found = await screens.or_none(source.rows(step), problems) or []
        rows = [(place, row) for place, row in enumerate(found) if row.get("ordinal") == ordinal]
    name = (group or {}).get("task_id") or (letter or {}).get("task_id") or ""
    events = await asyncio.to_thread(log_entries, source.folder, {"task": name}) if name else []
    return {
        "ordinal": ordinal,
        "fate": fate,
        "step": step,
        "task": name,
        "group": group,
        "made": made,
        "letter": letter,
        "rows": rows,
        "events": [(one.order(), one.process, one.fields) for one in events],
        "problems": problems,
        "command": f"trinity deadletters show {ordinal} {source.option}" if letter else
        f"trinity batch show {step} {source.option}" if step else f"trinity status {source.option_of_status}",
    }  # fmt: skip


async def trace(source: Source, number: int, index: int) -> Facts:
    """Returns the stations of one sample, from its attempts to the weights that learned from it.

    Raises RunError if there is none.
    """
    row = screens.experience(await source.rows(number), number, index)
    problems: list[str] = []
    entry = await screens.or_none(source.entry(number), problems)
    made = (await screens.or_none(source.attempts(number), problems) or {}).get(row.get("ordinal", 0))
    spans: list[tuple[str, str, Span]] = []
    for event in await asyncio.to_thread(log_entries, source.folder, {"task": row.get("task_id")}):
        if event.fields.get("event") == FAILED:
            about = f"attempt {event.fields.get('attempt')} failed", str(event.fields.get("cause", ""))
            spans.append((*about, Span("failed", event.order(), event.order())))
    if made is not None and entry is not None:
        names = (f"sampled by {made['explorer']}", f"attempt {made['attempt']}"), ("waits for its batch", "")
        found = _sampled(made, entry["written_at_seconds"])
        spans += [(*name, span) for name, span in zip(names, found, strict=False)]
    spans += [("trained", f"step {number}", span) for span in await asyncio.to_thread(_training, source.folder, number)]
    spans += await asyncio.to_thread(_published, source.folder, number, spans[-1][2].end if spans else 0.0)
    whole = [span for _, _, span in spans]
    axis = _axis(whole)
    begin = min((span.begin for span in whole), default=0.0)
    return {
        "number": number,
        "index": index,
        "row": row,
        "begin": begin,
        "lanes": [
            (name, about, span.begin - begin, span.end - span.begin, charts.lane([span], axis))
            for name, about, span in spans
        ],
        "problems": problems,
        "command": f"trinity view --step {number} --index {index} {source.option}",
    }


def _axis(whole: list[Span]) -> charts.Axis:
    return charts.Axis(whole, [span for span in whole if span.css in ("sampled", "trained")])


def _sampled(made: Facts | None, written: float) -> list[Span]:
    if made is None:
        return []
    begin, end = made["started_at_seconds"], made["finished_at_seconds"]
    return [Span("sampled", begin, end), Span("waited", end, max(end, written))]


def _training(folder: Path | None, step: int) -> list[Span]:
    """Returns the trainer's time on a step, from its monitor.

    For a step that was trained again, the last time counts.
    """
    line = series.at(folder, "trainer", step)
    end, seconds = line.get("time"), line.get("time/step")
    if not isinstance(end, (int, float)) or not isinstance(seconds, (int, float)):
        return []
    return [Span("trained", end - seconds, end)]


def _published(folder: Path | None, step: int, trained: float) -> Iterator[tuple[str, str, Span]]:
    """Returns the version of a step: until it was LIVE, and until each explorer had it."""
    live = [one for one in log_entries(folder, {"event": LIVE}) if one.fields.get("step") == step]
    if not live:
        return
    version = live[-1].fields.get("version")
    yield f"version {version} becomes LIVE", "", Span("published", min(trained, live[-1].order()), live[-1].order())
    for one in log_entries(folder, {"event": LOADED}):
        if one.fields.get("version") == version:
            yield f"{one.process} loads it", "", Span("published", min(trained, one.order()), one.order())


def log_entries(folder: Path | None, wanted: Mapping[str, Any]) -> list[Entry]:
    """Returns lines of the process logs with these fields, oldest first."""
    needles = [_needle(name, value) for name, value in wanted.items()]
    found = _entries(folder, lambda line: all(needle in line for needle in needles))
    return [one for one in found if wanted.items() <= one.fields.items()]


def log_events(folder: Path | None, events: Collection[str]) -> list[Entry]:
    """Returns lines of the process logs about these events, oldest first."""
    needles = [_needle("event", event) for event in events]
    found = _entries(folder, lambda line: any(needle in line for needle in needles))
    return [one for one in found if one.fields.get("event") in events and one.time is not None]


def _needle(name: str, value: Any) -> bytes:
    return json.dumps({name: value})[1:-1].encode()


def _entries(folder: Path | None, wanted: Callable[[bytes], bool]) -> list[Entry]:
    """Returns the `wanted` lines, oldest first."""
    found = []
    for path in sorted((folder / "log").glob("*.log")) if folder is not None else ():
        if path.stem not in _LEFT_OUT:
            found += [parse(line, path.stem) for line in _lines(path) if wanted(line)]
    return sorted(found, key=Entry.order)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        left = _MOST_BYTES
        for line in GrowingFile(path).backwards():
            yield line
            left -= len(line) + 1
            if left < 0:
                return
    except UNREADABLE:
        return
