"""`trinity view`: the experiences a step was trained on. Terminal escapes and markup in texts of models are escaped."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity.commands import AsJson, command, group
from trinity.reading.errors import RunError
from trinity.reading.find import AnnouncedRun, find_run
from trinity.reading.reader import JobStage, announced_stage, find_job_stage
from trinity.reading.render import clipped, pairs, table, to_json, visible
from trinity.study.references import UNREADABLE, References
from trinity.study.view import ARRAYS, Row, read_log, read_step, versions, with_arrays

app = group()

_PREVIEW, _PROMPT = 80, 40  # characters
_TEXTS = ("prompt", "response")


def find_rows(
    config: Path | None = None, job: Path | None = None, stage: str = "", nats: str = "", run: str = ""
) -> Path | JobStage:
    """Returns the job folder that has the file, the named stage, or the live run that --nats and --run name."""
    if stage:
        return find_job_stage(config, job, stage, nats, run)
    place = find_run(config, job, nats, run)
    return announced_stage(place) if isinstance(place, AnnouncedRun) else place


@command(app, "view", find_rows)
def view(
    place: Path | JobStage,
    step: Annotated[
        int | None, typer.Option("--step", help="Experience of this optimizer step; else the newest")
    ] = None,
    index: Annotated[int | None, typer.Option("--index", "-i", help="Show one of them whole, by its number")] = None,
    task: Annotated[str, typer.Option("--task", help="Those whose task id contains this")] = "",
    as_json: AsJson = False,
    sort: Annotated[
        str, typer.Option("--sort", help="By this field, smallest first (-reward: greatest first): the worst on top")
    ] = "",
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most this many")] = None,
) -> str:
    """Show the experiences that were trained: reward, advantage and the versions that sampled them."""
    if index is not None and (sort or limit is not None):
        raise RunError(f"--index {index} shows one experience; leave --sort and --limit out", 2)
    if index is not None and task:
        raise RunError(f"--index {index} --task {task}: give one of them", 2)
    if isinstance(place, JobStage) and place.folders is None:
        found = read_log(place, step)
    else:
        found = read_step(place if isinstance(place, Path) else place.folder, step)
    rows = list(enumerate(found))
    if index is not None:
        if not 0 <= index < len(rows):
            step = rows[0][1]["step"]
            raise RunError(f"no experience {index} in step {step}; there are 0 to {len(rows) - 1}")
        shown = [rows[index]]
    else:
        shown = [(number, row) for number, row in rows if task in str(row.get("task_id", ""))]
        if not shown:
            known = visible(str(rows[0][1].get("task_id", "")))
            raise RunError(f"no task id of step {rows[0][1]['step']} contains {task!r}; one of them is {known!r}")
    shown = _with_references(place, _sorted(shown, sort)[:limit])
    if as_json:
        try:
            return to_json([with_arrays(row) for _, row in shown])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"step {rows[0][1]['step']}: arrays of an experience are damaged: {error}"
            raise RunError(problem) from None
    return _table(shown, len(rows)) if index is None else _whole(shown[0][1], index, len(rows))


def _with_references(place: Path | JobStage, rows: list[tuple[int, Row]]) -> list[tuple[int, Row]]:
    """Adds the answer that the taskset has for each task, where the taskset can be read here."""
    try:
        stage = find_job_stage(job=place) if isinstance(place, Path) else place
    except UNREADABLE:  # a folder without the run's configuration
        return rows
    references = References(stage.config, stage.folders[1] if stage.folders else None)
    answers = [references.of(row) for _, row in rows]
    return [
        (number, row if answer is None else {**row, "reference": answer})
        for (number, row), answer in zip(rows, answers, strict=True)
    ]


def _sorted(rows: list[tuple[int, Row]], by: str) -> list[tuple[int, Row]]:
    """Sorts by a field, or by a metric of that name. Raises RunError if no row has it as a number."""
    field = by.removeprefix("-")

    def value(row: Row) -> float | None:
        metrics = row.get("metrics")
        found = row[field] if field in row else metrics.get(field) if isinstance(metrics, dict) else None
        return float(found) if isinstance(found, (int, float)) and math.isfinite(found) else None

    if not by:
        return rows
    values = {number: found for number, row in rows if (found := value(row)) is not None}
    if not values:
        numeric = sorted(name for name, found in rows[0][1].items() if isinstance(found, (int, float)))
        raise RunError(f"--sort {by}: no experience has this number; there are {', '.join(numeric)}", 2)
    sign = -1 if by.startswith("-") else 1
    return sorted(rows, key=lambda one: (one[0] not in values, sign * values.get(one[0], 0.0)))


_COLUMNS: dict[str, Callable[[tuple[int, Row]], Any]] = {
    "#": lambda one: one[0],
    "task": lambda one: one[1].get("task_id", ""),
    "rollout": lambda one: one[1].get("rollout", ""),
    "reward": lambda one: _decimal(one[1].get("reward")),
    "advantage": lambda one: _decimal(one[1].get("advantage")),
    "tokens": lambda one: f"{one[1].get('prompt_tokens', '?')}+{one[1].get('response_tokens', '?')}",
    "weights": lambda one: versions(one[1].get("versions")),
    "stale": lambda one: one[1].get("staleness", ""),
    "truncated": lambda one: str(one[1].get("truncation", "none")).replace("none", ""),
    "prompt": lambda one: clipped(str(one[1].get("prompt", "")), _PROMPT),
    "reference": lambda one: clipped(str(one[1].get("reference", "")), _PROMPT),
    "response": lambda one: _preview(str(one[1].get("response", ""))),
}


def _table(shown: list[tuple[int, Row]], total: int) -> str:
    rewards = [value for _, row in shown if isinstance(value := row.get("reward"), (int, float))]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    part = f"{len(shown)} of {total}" if len(shown) < total else str(total)
    columns = {name: _COLUMNS[name] for name in _COLUMNS if name != "reference" or any(name in row for _, row in shown)}
    return f"step {shown[0][1]['step']}: {part} experiences{mean}\n{table(shown, columns)}"


def _preview(text: str) -> str:
    """Returns the beginning of a response; --index shows all of it."""
    return text if len(text) <= _PREVIEW else text[:_PREVIEW] + "..."


def _decimal(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else "-"


def moves(value: Any) -> str:
    """Describes where an episode moved to another explorer: "turn 4: a -> b". Returns other values as JSON."""
    try:
        return "; ".join(
            f"turn {move['turn']}{f', token {at}' if (at := move.get('token')) else ''}: "
            f"{move['from']} -> {move.get('to', '?')}"
            for move in value
        )
    except (TypeError, LookupError, AttributeError):
        return json.dumps(value)


_SHOWN: dict[str, Callable[[Any], str]] = {"versions": versions, "moved": moves}


def _whole(row: Row, index: int, total: int) -> str:
    fields = {
        visible(key): _SHOWN.get(key, json.dumps)(value) if not isinstance(value, str) else value
        for key, value in row.items()
        if key not in (*_TEXTS, ARRAYS)
    }
    lines = [f"experience {index} of {total}", pairs(fields)]
    for key in _TEXTS:
        lines += ["", visible(f"--- {key}: {row.get(f'{key}_tokens', '?')} tokens ---")]
        lines.append(visible(str(row.get(key, "")), layout=True))
    return "\n".join(lines)
