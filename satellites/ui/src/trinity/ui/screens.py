"""The values of each screen for its template, read by trinity.reading.

A part that cannot be read is None, and `problems` has the reason: the rest of the page is shown.
"""

import asyncio
import shlex
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup

from trinity.config import flat
from trinity.reading import series
from trinity.reading.alarms import Known, alarms, disk_of
from trinity.reading.errors import RunError
from trinity.reading.job import describe_finished
from trinity.study import results
from trinity.study.log import JobLogs, history
from trinity.study.log_entry import Entry, Wanted
from trinity.ui import charts, curves, pictures, replays, samples, tokens
from trinity.ui.audit import count_problems
from trinity.ui.places import Places, Unreadable
from trinity.ui.source import UNREADABLE, Source
from trinity.weights import checkpoints

Facts = dict[str, Any]
T = TypeVar("T")

_STEPS = 200  # of monitors, for curves
_LISTED_STEPS = 50
_WAITED_STEPS = 20
_TIMES = {"time/wait": "waiting for samples", "time/buffer": "fetching the batch", "time/step": "training",
          "time/publish": "publishing", "time/save": "saving"}  # fmt: skip
_OFFLINE_TILES = ("step", "trained", "step time", "loss")
_RUNS_WITH_CURVES = 60
_LOG_LINES = 300


async def runs(places: Places) -> Facts:
    """Returns all runs, from their folders: no service is called."""
    found = await asyncio.to_thread(places.find)
    listed = list(found.items())[:_RUNS_WITH_CURVES]
    rows, damaged = await asyncio.to_thread(_run_rows, listed)
    return {"rows": rows, "unreadable": [*places.unreadable, *damaged], "more": len(found) - len(listed)}


def _run_rows(listed: list[tuple[str, Source]]) -> tuple[list[Facts], list[Unreadable]]:
    """Returns a row for each run, and the runs that have none."""
    rows, damaged = list[Facts](), list[Unreadable]()
    for key, source in listed:
        try:
            rows.append(_run_row(key, source))
        except UNREADABLE as error:
            damaged.append(Unreadable(source.folder or Path(key), _error_text(error)))
    return rows, damaged


def _run_row(key: str, source: Source) -> Facts:
    trainer = series.read(source.folder, "trainer", _STEPS)
    explorer = series.read(source.folder, "explorer", _STEPS)
    rewards = series.values(trainer, "sample/reward_mean")
    return {
        "key": key,
        "title": source.title,
        "state": _state(source),
        "step": trainer[-1]["step"] if trainer else None,
        "reward": rewards[-1] if rewards else None,
        "curve": charts.sparkline(rewards, "reward"),
        "tokens": series.newest(trainer, "perf/tokens_per_second"),
        "at": max(series.values([*trainer[-1:], *explorer[-1:]], "time"), default=0.0),
        "alarms": alarms(Known(None, None, trainer, explorer)),
    }


def _state(source: Source) -> str:
    """Returns the word for a run's state. A run without a folder has ended; that of an unreadable folder is unknown."""
    try:
        if source.is_live:
            return "live"
        if source.job_stage.folders is None:
            return "ended"
        return str(describe_finished(source.job_stage.job)["state"])
    except UNREADABLE:
        return "unknown"


async def overview(source: Source) -> Facts:
    """Returns tiles, the state of the ledger, alarms, staleness, waiting times and the newest steps of a run."""
    problems: list[str] = []
    counts = await or_none(source.counts(), problems)
    now = await or_none(source.status(), problems)
    trainer = await asyncio.to_thread(series.read, source.folder, "trainer", _STEPS)
    explorer = await asyncio.to_thread(series.read, source.folder, "explorer", _STEPS)
    offline = source.audit.is_offline
    return {
        "state": _state(source),
        "counts": counts,
        "status": now,
        "problems": problems,
        "tiles": [tile for tile in _tiles(counts, now, trainer) if _has_tile(tile[0], offline)],
        "ledger": _ledger(source, counts) if not offline else None,
        "is_offline": offline,
        "alarms": alarms(Known(counts, now, trainer, explorer, disk_of(source.folder))),
        "staleness": _staleness(source, counts),
        "times": _times(trainer[-_WAITED_STEPS:]),
        "steps": source.audit.steps[: -_LISTED_STEPS - 1 : -1] or _trained_steps(trainer),
        "read_at": time.time(),
    }


async def whole_overview(source: Source, key: str) -> Facts:
    """Adds the curves, and those of `trinity results`, which are read from whole files."""
    return {
        **await overview(source),
        "evaluations": await asyncio.to_thread(_evaluations, source),
        "curves": await curves.of_runs({key: source}),
        "checkpoints": await asyncio.to_thread(_checkpoints, source.folder),
        "notes": await asyncio.to_thread(source.notes),
    }


def _checkpoints(folder: Path | None) -> list[Facts]:
    """Returns step, folder and Hugging Face folder of each checkpoint, newest first."""
    if folder is None:
        return []
    found = [(step, checkpoints.model_folder(folder, step)) for step in reversed(checkpoints.complete_steps(folder))]
    return [
        {
            "step": step,
            "folder": checkpoints.checkpoint_folder(folder, step),
            "model": model if checkpoints.has_weights(model) else None,
        }
        for step, model in found
    ]


async def log(source: Source, level: str) -> Facts:
    """Returns the last lines of all processes of the run. Raises RunError for an unknown level, or without a folder."""
    if source.folder is None:
        raise RunError("this run's log is on another machine; trinity log shows it")
    level = level or "info"
    wanted = Wanted.of(level, "", "")
    folder = source.folder if (source.folder / "log").is_dir() else source.job_stage.job

    def read() -> list[Entry]:
        logs = JobLogs(folder, "")
        logs.poll()
        return list(history(list(logs.by_path.values()), _LOG_LINES, wanted))

    entries = await asyncio.to_thread(read)
    return {
        "entries": [(one, _rest(one)) for one in reversed(entries)],
        "levels": ("debug", "info", "warning", "error"),
        "level": level,
        "live": source.is_live,
        "command": f"trinity log --follow {source.option_of_status}",
    }


def _rest(entry: Entry) -> str:
    """Returns the fields of a log line that have no column; the whole line if it is text."""
    hidden = ("event", "level", "time", "service", "process")
    return " ".join(f"{name}={value}" for name, value in entry.fields.items() if name not in hidden) or (
        "" if entry.fields else entry.text
    )


async def configuration(places: Places, source: Source) -> Facts:
    """Returns every value of the run's YAML with its key, and the runs to which it can be compared."""
    found = await asyncio.to_thread(places.find)
    return {
        "settings": sorted(flat(source.job_stage.config).items()),
        "others": [(key, one.title) for key, one in found.items() if one is not source],
    }


def _evaluations(source: Source) -> list[tuple[results.Curve, Markup]]:
    if source.folder is None:
        return []
    try:
        curves = results.collect([source.folder], results.METRICS)
    except UNREADABLE:  # none was made
        return []
    return [(one, charts.sparkline([value for _, value in one.points], one.metric)) for one in curves]


async def or_none(reading: Awaitable[T], problems: list[str]) -> T | None:
    """Returns the awaited value; None if it cannot be read, with the reason in `problems`."""
    try:
        return await reading
    except UNREADABLE as error:
        problems.append(_error_text(error))
        return None


def _error_text(error: BaseException) -> str:
    return str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"


def _tiles(counts: Facts | None, now: Facts | None, trainer: list[series.Line]) -> list[tuple[str, Any, str]]:
    """Returns (name, value, note); the value is None if unknown."""
    newest = {name: series.newest(trainer, name) for name in trainer[-1]} if trainer else {}
    step = now["step"] if now and now["step"] is not None else (trainer[-1]["step"] if trainer else None)
    found = counts or {}
    live = (now or {}).get("weights") or {}
    return [
        ("step", step, f"of {found['last_step']}" if found.get("last_step") else ""),
        ("reward", newest.get("sample/reward_mean"), "step mean"),
        ("groups", found.get("stored"), "stored"),
        ("outstanding", found.get("outstanding"), "not ended"),
        ("dead", found.get("dead_letters"), "tasks"),
        ("attempts", found.get("failed_attempts"), "failed"),
        ("staleness", found.get("staleness_max"), f"bound {found['max_staleness_steps']}" if found else ""),
        ("weights", _version(live.get("live", found.get("live_step"))), "LIVE version"),
        ("explorers", len(now["explorers"]) if now else None, "joined"),
        ("tokens/s", now["tokens_per_second"] if now else None, "sampled"),
        ("trained", newest.get("perf/tokens_per_second"), "tokens/s"),
        ("step time", newest.get("time/step"), "s"),
        ("loss", newest.get(_loss(trainer)), "step mean"),
    ]


def _has_tile(name: str, offline: bool) -> bool:
    return name in _OFFLINE_TILES if offline else name != "loss"


def _loss(trainer: list[series.Line]) -> str:
    """Returns the name of the loss in the newest step's metrics; empty without one."""
    return next((name for name in (trainer[-1] if trainer else {}) if name.endswith("_loss")), "")


def _version(number: int | None) -> int | None:
    """Returns None without a LIVE version, and for a read-only buffer, which does not know it."""
    return number if number is not None and number >= 0 else None


def _ledger(source: Source, counts: Facts | None) -> Facts | None:
    """Returns the bar of tasks, and contradictions in the counts; None if the buffer does not answer."""
    if counts is None:
        return None
    audit = source.audit
    parts = {"stored": counts["stored"], "dead": counts["dead_letters"], "outstanding": counts["outstanding"]}
    parts |= {"cut": counts["cut_tasks"]} if counts["cut_tasks"] else {}
    return {
        "problems": [*count_problems(counts), *audit.problems()],
        "bar": charts.stacked(parts, colours=4),
        "read": audit.newest_step,
        "of": counts["ledger_step"],
        "counted": audit.account is not None,
        "drops": dict(audit.dropped),
    }


def _staleness(source: Source, counts: Facts | None) -> list[tuple[int, int, int, bool]]:
    """Returns (steps old, groups, percent of the most, beyond the bound) for each age in the ledger."""
    found = source.audit.staleness
    bound = counts["max_staleness_steps"] if counts else 0
    most = max(found.values(), default=1)
    return [(age, found[age], round(100 * found[age] / most), age > bound) for age in sorted(found)]


def _times(lines: list[series.Line]) -> list[tuple[str, float, float]]:
    """Returns (activity, seconds, share) of the newest steps."""
    sums = {text: sum(series.values(lines, name)) for name, text in _TIMES.items()}
    total = sum(sums.values())
    return [(text, seconds, 100 * seconds / total) for text, seconds in sums.items()] if total else []


def _trained_steps(trainer: list[series.Line]) -> list[Facts]:
    """Returns the steps in the monitor, if the ledger cannot be read."""
    names = {"reward_mean": "sample/reward_mean", "staleness_max": "sample/staleness_max"}
    newest = trainer[: -_LISTED_STEPS - 1 : -1]
    return [{"step": line["step"], **{name: line.get(key) for name, key in names.items()}} for line in newest]


async def step(source: Source, number: int) -> Facts:
    """Returns a step's ledger entry, and the measurements of trainer and explorers.

    Raises RunError if neither is known.
    """
    problems: list[str] = []
    entry = await or_none(source.entry(number), problems)
    metrics: Facts = {}
    for role in ("trainer", "explorer"):
        metrics |= await asyncio.to_thread(series.at, source.folder, role, number)
    if entry is None and not metrics:
        raise RunError("; ".join(problems))
    rows = await or_none(source.rows(number), []) or []
    return {
        "number": number,
        "entry": entry,
        "metrics": sorted((name, value) for name, value in metrics.items() if name not in ("step", "time")),
        "worst": samples.worst(rows),
        "spreads": samples.spreads(rows),
        "replays": await asyncio.to_thread(_replays, source.folder, number),
        "problems": problems,
        "command": f"trinity batch show {number} {source.option}",
    }


def _replays(folder: Path | None, number: int) -> list[tuple[str, replays.Step]]:
    """Returns (name, result) of each replay of a step."""
    found = ((one.name, one.of_step(number)) for one in replays.read(folder))
    return [(name, one) for name, one in found if one is not None]


async def group(source: Source, number: int, ordinal: int) -> Facts:
    """Returns the samples of one group of a step. Raises RunError if the step has none of it."""
    rows = [(place, row) for place, row in enumerate(await source.rows(number)) if row.get("ordinal") == ordinal]
    if not rows:
        raise RunError(f"no trained experience of group {ordinal} in step {number}")
    problems: list[str] = []
    entry = await or_none(source.entry(number), problems) or {"groups": []}
    task = str(rows[0][1].get("task_id", ""))
    return {
        "number": number,
        "ordinal": ordinal,
        "task": task,
        "rows": rows,
        "pictures": pictures.names(rows[0][1]),
        "spread": samples.spreads([row for _, row in rows])[ordinal],
        "reference": await asyncio.to_thread(samples.reference, source, rows[0][1]),
        "parts": sorted({name for _, row in rows for name in row.get("metrics") or {}}),
        "facts": next((one for one in entry["groups"] if one["ordinal"] == ordinal), None),
        "problems": problems,
        "command": f"trinity view --step {number} --task {shlex.quote(task)} {source.option}",
    }


async def sample(source: Source, number: int, index: int, by: str) -> Facts:
    """Returns prompt, response by tokens, and fields of one experience. Raises RunError for an unknown number."""
    rows = await source.rows(number)
    row = experience(rows, number, index)
    hidden = ("prompt", "response", "arrays", "metrics", "images")
    return {
        "last": len(rows) - 1,
        "row": row,
        "pictures": pictures.names(row),
        "fields": [(name, value) for name, value in row.items() if name not in hidden],
        "versions": sorted({span[0] for span in row.get("versions") or []}),
        "parts": sorted((row.get("metrics") or {}).items()),
        "reference": await asyncio.to_thread(samples.reference, source, row),
        "turns": _turns(rows, row),
        "command": f"trinity view --step {number} --index {index} {source.option}",
        "colourings": tokens.COLOURINGS,
        "recorded": tokens.recorded(row),
        **await sample_tokens(source, number, index, 0, by),
    }


async def sample_tokens(source: Source, number: int, index: int, first: int, by: str) -> Facts:
    """Returns some thousand tokens of a response from `first` on, coloured by one of tokens.COLOURINGS.

    Raises RunError without such an experience.
    """
    row = experience(await source.rows(number), number, index)
    problems: list[str] = []
    blocks: list[list[tokens.Token]] = []
    following = 0
    try:
        tokenizer = await asyncio.to_thread(
            tokens.tokenizer_of, source.folder, source.job_stage.config.model.model_path
        )
        blocks, following = await asyncio.to_thread(tokens.blocks, row, tokenizer, first, by)
    except UNREADABLE as error:
        problems.append(f"the tokens cannot be shown: {_error_text(error)}")
    return {"number": number, "index": index, "blocks": blocks, "following": following, "problems": problems}


def experience(rows: list[Facts], number: int, index: int) -> Facts:
    """Returns row `index` of a step. Raises RunError if it has none."""
    if not 0 <= index < len(rows):
        raise RunError(f"no experience {index} in step {number}; there are 0 to {len(rows) - 1}")
    return rows[index]


def _turns(rows: list[Facts], row: Facts) -> list[tuple[int, Any]]:
    """Returns (index, turn) of the other turns of the same rollout."""
    same = ("task_id", "rollout")
    return [
        (place, one.get("turn"))
        for place, one in enumerate(rows)
        if one is not row and all(one.get(name) == row.get(name) for name in same)
    ]
