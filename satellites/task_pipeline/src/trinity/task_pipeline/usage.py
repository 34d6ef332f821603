"""Counts how often earlier runs trained a row, from their trainers' <job>/buffer/experience_buffer.jsonl.

A record names taskset and row, and the job's config.json names the taskset's file. A row counts if this file is an
unchanged input of ours, or was made from one by a task pipeline whose manifest lists the rows. A group counts once for
each step that trained it. Rows that cannot be identified this way are not counted.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trinity.data.datasets import DatasetError
from trinity.task_pipeline.base import Context, Input
from trinity.task_pipeline.output import Manifest, read_manifest

_RECORDS = "experience_buffer.jsonl"
_PRUNED = ("global_step_", "nats", "weights", "log", "monitor", "bench")

Translation = Callable[[int], int | None]


def counts(context: Context, folders: Sequence[str] = ()) -> Counter[int]:
    """Row, numbered over all inputs -> number of steps that trained it. Raises DatasetError for a wrong folder."""
    places = [Path(os.path.expanduser(folder)) for folder in folders] or [context.project_dir]
    for folder, place in zip(folders, places, strict=False):
        if not os.path.isdir(place):
            raise DatasetError(f"folder {folder!r} does not exist; folders are job folders of earlier runs")
    found: Counter[int] = Counter()
    for stage in sorted({stage for place in places for stage in _stages(place)}):
        rows = _translations(stage, context.inputs)
        for taskset, row in _trained(stage / "buffer" / _RECORDS) if rows else ():
            number = rows[taskset](row) if taskset in rows else None
            if number is not None:
                found[number] += 1
    return found


def _stages(place: Path) -> Iterator[Path]:
    for folder, below, _ in os.walk(place):
        below[:] = [name for name in below if not name.startswith(_PRUNED)]
        if Path(folder).name == "buffer" and Path(folder, _RECORDS).is_file():
            yield Path(folder).parent.resolve()


def _trained(file: Path) -> list[tuple[str, int]]:
    """Taskset and row of every trained group. A step that is repeated after a crash is recorded again."""
    seen: dict[tuple[int, str], tuple[str, int]] = {}
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
                task_id, step = str(record["task_id"]), int(record["step"])
                taskset, _, _, row = task_id.rsplit("/", 3)  # <taskset>/<epoch>/<position>/<row>
                seen[step, task_id] = (taskset, int(row))
            except (
                ValueError,
                KeyError,
                TypeError,
                RecursionError,
            ):  # a record torn by a crash, or no task of a taskset
                continue
    return list(seen.values())


def _translations(stage: Path, inputs: Sequence[Input]) -> dict[str, Translation]:
    """Name of a taskset of an earlier run -> translation of its row numbers to ours."""
    try:
        config = stage / "config.json"
        source, written = json.loads(config.read_bytes())["buffer"]["explorer_input"], config.stat().st_mtime
        tasksets = [source["taskset"]] if source.get("taskset") else source.get("tasksets") or []
        found = {}
        for index, taskset in enumerate(tasksets):
            translation = _translation(taskset, inputs, written)
            if translation is not None:
                found[str(taskset.get("name") or f"taskset_{index}")] = translation
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no configuration of ours
        return {}


def _translation(taskset: dict[str, Any], inputs: Sequence[Input], written: float) -> Translation | None:
    path = Path(taskset["path"]).expanduser().resolve()
    made = read_manifest(path)
    if made is not None:
        return partial(_through, made, inputs)
    place = (str(taskset.get("split") or ""), str(taskset.get("subset_name") or "")) if path.is_dir() else ("", "")
    for one in inputs:
        if (one.path, one.split, one.subset) == (path, *place) and one.changed <= written:
            return partial(_directly, one)
    return None


def _directly(one: Input, row: int) -> int | None:
    return one.first + row if 0 <= row < one.rows else None


def _through(made: Manifest, inputs: Sequence[Input], row: int) -> int | None:
    """Our number for a row of a file that a pipeline made."""
    if not 0 <= row < len(made.rows):
        return None
    number = made.rows[row]
    for before in made.inputs:
        local = number - before["first"]
        if 0 <= local < before["rows"]:
            return next((one.first + local for one in inputs if one.digest == before["digest"]), None)
    return None
