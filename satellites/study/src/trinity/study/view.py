"""The experiences that a step was trained on, from <job>/[<stage>/]buffer/experience_buffer.jsonl.

A run that NATS names has them in its ledger and log, without advantages, which only the trainer's file has. The trainer
appends one line per experience, steps in ascending order. After a crash steps are trained and appended again: the last
stretch of a step counts, and in it the last line of a turn. The file may be many GB. It is read from its end, and only
lines of the requested step are parsed.
"""

import base64
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trinity.config import load, make_plan
from trinity.reading.errors import RunError
from trinity.reading.job import last_trained
from trinity.reading.reader import JobStage, Reader, ask, read_only_buffer, stage_configs
from trinity.reading.tail import lines_backwards, whole_end
from trinity.runtime import files

_NAME = Path("buffer", "experience_buffer.jsonl")
_STEP = re.compile(rb'\{"step": (-?\d+),')
ARRAYS = "arrays"  # in base64; --json shows them
_KINDS = {
    "token_ids": "<i4", "mask": "u1", "logprobs": "<f4",
    "new_logprobs": "<f4", "proximal_logprobs": "<f4", "entropy": "<f2", "clipped": "u1",
}  # fmt: skip

Row = dict[str, Any]


def find_file(folder: Path) -> Path:
    """Returns the file of the stage that was trained last. Raises RunError if no stage has one."""
    found = [path for path in (folder / _NAME, *folder.glob(f"*/{_NAME}")) if path.is_file()]
    if not found:
        raise _nothing_kept(folder)
    return max(found, key=lambda path: path.stat().st_mtime)


def read_step(folder: Path, step: int | None) -> list[Row]:
    """Returns the experiences of a step in the order of training. Raises RunError if there are none."""
    steps: set[int] = set()
    for number, rows in stretches(folder, lambda number: step in (None, number)):
        if rows:
            return rows
        steps.add(number)
    if not steps or step is None:
        raise _nothing_kept(folder)
    raise RunError(f"no experience of step {step}; there are steps {min(steps)} to {max(steps)}")


def stretches(folder: Path, wanted: Callable[[int], bool]) -> Iterator[tuple[int, list[Row]]]:
    """Yields step and experiences of each stretch, last in the file first. Steps that are not `wanted` have none.

    A step that was trained again has several stretches, of which the first counts. Raises NothingKept without a file.
    """
    number: int | None = None
    rows: list[Row] = []
    with find_file(folder).open("rb", buffering=0) as file:
        for line in lines_backwards(file, whole_end(file)):
            match = _STEP.match(line)
            if match is None:
                continue
            if number is not None and int(match[1]) != number:
                yield number, _last_of_each(reversed(rows))
                rows = []
            number = int(match[1])
            if wanted(number):
                rows += files.json_lines([line])
    if number is not None:
        yield number, _last_of_each(reversed(rows))


def read_log(job_stage: JobStage, step: int | None) -> list[Row]:
    """Returns the experiences of a step, or of the newest with a batch, from ledger and log.

    Raises RunError if there are none.
    """

    async def read(reader: Reader) -> list[Row]:
        number = await reader.buffer.newest_step() if step is None else step
        if not number:
            raise RunError(f"no step of {job_stage.name} has a batch yet")
        batch = await reader.buffer.entry_with_texts(number, sys.maxsize)
        facts = ("task_id", "ordinal", "log_sequence")
        rows = [
            {"step": number, **{name: group[name] for name in facts}, "staleness": group["staleness_steps"], **one}
            for group in batch["groups"]
            for one in group["experiences"]
        ]
        if not rows:
            raise NothingKept(_on_a_dataset(job_stage, number))
        return rows

    return ask(read_only_buffer, job_stage, read)


def _last_of_each(rows: Iterable[Row]) -> list[Row]:
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = tuple(str(row.get(name)) for name in ("task_id", "rollout", "turn"))
        found.pop(key, None)  # the order is that of the last time
        found[key] = row
    return list(found.values())


def with_arrays(row: Row) -> Row:
    """Returns the row with `arrays` as lists of numbers. Files of older versions have none."""
    found = {key: value for key, value in row.items() if key != ARRAYS}
    for name, values in arrays(row).items():
        found[name] = np.round(values.astype(float), 6).tolist() if values.dtype.kind == "f" else values.tolist()
    return found


def arrays(row: Row) -> dict[str, np.ndarray]:
    """Returns token_ids [P + R], mask and logprobs [R]; empty for a row without. Raises ValueError or KeyError if
    damaged.

    Some steps also record, [R] each: new_logprobs and entropy under the trainer's weights of its last update, clipped
    unless the loss has no clip, and proximal_logprobs at the begin of the step if that is another update.
    """
    written = row.get(ARRAYS) or {}
    return {name: np.frombuffer(base64.b64decode(text), dtype=_KINDS[name]) for name, text in written.items()}


class NothingKept(RunError):
    """The job has no file of experiences."""


def _on_a_dataset(job_stage: JobStage, step: int) -> str:
    return f"{job_stage.name} learns from a dataset: `trinity batch show {step} {job_stage.option}` lists its rows"


def _nothing_kept(folder: Path) -> NothingKept:
    begun = stage_configs(folder)
    if begun and make_plan(config := load(begun[-1], plugins_loaded=False)).algorithm.offline:
        stage = begun[-1].parent
        job = folder.parent if (folder.parent / "version.json").exists() else folder
        trained = last_trained(stage)
        if trained is None:
            return NothingKept(f"{folder} learns from a dataset, and has trained no step yet")
        job_stage = JobStage(stage.name if stage != job else "", config, (job, stage))
        return NothingKept(_on_a_dataset(job_stage, trained["step"]))
    return NothingKept(
        f"no experience is kept in {folder}; buffer.save_experiences is on by default and writes it as steps are "
        "trained"
    )


def versions(value: Any) -> str:
    """Returns the weights that sampled a response: "12", or token ranges as "11:0-57 12:57-80"; "-" for none."""
    if not isinstance(value, list) or not value:
        return "-"
    try:
        if len(value) == 1:
            return str(value[0][0])
        return " ".join(f"{version}:{first}-{end}" for version, first, end in value)
    except (TypeError, ValueError, LookupError):
        return json.dumps(value)
