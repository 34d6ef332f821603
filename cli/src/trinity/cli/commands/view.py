"""`trinity view`: the experiences a step was trained on, from <job>/[<stage>/]buffer/experience_buffer.jsonl.

Of a run that NATS names they come out of its ledger and log: without advantages, which are in the trainer's file alone.
The trainer appends one line per experience, steps in ascending order. After a crash steps are trained again and
appended again, so what counts is the last stretch of a step's lines, and in it the last line of a turn. The file may
be many GB: it is read from its end, and only lines of the step asked for are parsed. What models wrote may hold
terminal escapes and markup; none of it reaches the terminal as such.
"""

import base64
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from trinity.cli.commands.find import AnnouncedRun, find_run
from trinity.cli.commands.reader import JobStage, Reader, announced_stage, ask, read_only_buffer
from trinity.cli.errors import RunError
from trinity.cli.options import AsJson, JobOption, NatsOption, RunName, RunOption, command, group
from trinity.cli.render import pairs, table, to_json, visible
from trinity.cli.tail import lines_backwards, whole_end
from trinity.runtime import files

app = group()

_NAME = Path("buffer", "experience_buffer.jsonl")
_STEP = re.compile(rb'\{"step": (-?\d+),')
_PREVIEW = 80  # characters
_TEXTS = ("prompt", "response")
_ARRAYS = "arrays"  # in base64; --json shows them
_KINDS = {
    "token_ids": "<i4", "mask": "u1", "logprobs": "<f4",
    "new_logprobs": "<f4", "proximal_logprobs": "<f4", "entropy": "<f2", "clipped": "u1",
}  # fmt: skip

Row = dict[str, Any]


def find_rows(
    config: RunOption = None, job: JobOption = None, nats: NatsOption = "", run: RunName = ""
) -> Path | JobStage:
    """The job folder that has the file, or the live run that --nats and --run name."""
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
) -> str:
    """Show the experiences that were trained: reward, advantage and the versions that sampled them."""
    if index is not None and task:
        raise RunError(f"--index {index} --task {task}: give one of them", 2)
    rows = list(enumerate(read_step(place, step) if isinstance(place, Path) else read_log(place, step)))
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
    if as_json:
        try:
            return to_json([with_arrays(row) for _, row in shown])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"step {rows[0][1]['step']}: arrays of an experience are damaged: {error}"
            raise RunError(problem) from None
    return _table(shown, len(rows)) if index is None else _whole(shown[0][1], index, len(rows))


def find_file(folder: Path) -> Path:
    """The file of the stage that was trained last. RunError if no stage has one."""
    found = [path for path in (folder / _NAME, *folder.glob(f"*/{_NAME}")) if path.is_file()]
    if not found:
        raise _nothing_kept(folder)
    return max(found, key=lambda path: path.stat().st_mtime)


def read_step(folder: Path, step: int | None) -> list[Row]:
    """Experiences of a step in the order they were trained in. RunError if there are none."""
    steps: set[int] = set()
    for number, rows in stretches(folder, lambda number: step in (None, number)):
        if rows:
            return rows
        steps.add(number)
    if not steps or step is None:
        raise _nothing_kept(folder)
    raise RunError(f"no experience of step {step}; there are steps {min(steps)} to {max(steps)}")


def stretches(folder: Path, wanted: Callable[[int], bool]) -> Iterator[tuple[int, list[Row]]]:
    """Each stretch of a step's lines, the last in the file first: step and experiences, none unless it is `wanted`.

    A step that was trained again has several stretches, and the first of them counts. NothingKept without a file.
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
    """Experiences of a step out of ledger and log; else of the newest that has a batch. RunError if there are none."""

    async def read(reader: Reader) -> list[Row]:
        number = await reader.buffer.newest_step() if step is None else step
        if not number:
            raise RunError(f"no step of {job_stage.name} has a batch yet")
        batch = await reader.buffer.entry_with_texts(number, sys.maxsize)
        facts = ("task_id", "ordinal", "log_sequence")
        return [
            {"step": number, **{name: group[name] for name in facts}, "staleness": group["staleness_steps"], **one}
            for group in batch["groups"]
            for one in group["experiences"]
        ]

    rows = ask(read_only_buffer, job_stage, read)
    if not rows:
        raise RunError(f"that step of {job_stage.name} learns from a dataset: `trinity batch show` lists its rows")
    return rows


def _last_of_each(rows: Iterable[Row]) -> list[Row]:
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = tuple(str(row.get(name)) for name in ("task_id", "rollout", "turn"))
        found.pop(key, None)  # the order is that of the last time
        found[key] = row
    return list(found.values())


def with_arrays(row: Row) -> Row:
    """With `arrays` as lists of numbers. Files of older versions have none."""
    found = {key: value for key, value in row.items() if key != _ARRAYS}
    for name, values in arrays(row).items():
        found[name] = np.round(values.astype(float), 6).tolist() if values.dtype.kind == "f" else values.tolist()
    return found


def arrays(row: Row) -> dict[str, np.ndarray]:
    """token_ids [P + R], mask and logprobs [R]; none in a row without. ValueError or KeyError for damaged ones.

    Of a step that recorded them also [R]: new_logprobs under the trainer's weights of its last update, their entropy,
    clipped unless the loss has no clip, and proximal_logprobs as the step began, where that is another update.
    """
    written = row.get(_ARRAYS) or {}
    return {name: np.frombuffer(base64.b64decode(text), dtype=_KINDS[name]) for name, text in written.items()}


class NothingKept(RunError):
    """The job has no file of experiences."""


def _nothing_kept(folder: Path) -> NothingKept:
    return NothingKept(
        f"no experience is kept in {folder}; buffer.save_experiences is on by default and writes it as steps are "
        "trained"
    )


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
    "response": lambda one: _preview(str(one[1].get("response", ""))),
}


def _table(shown: list[tuple[int, Row]], total: int) -> str:
    rewards = [value for _, row in shown if isinstance(value := row.get("reward"), (int, float))]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    part = f"{len(shown)} of {total}" if len(shown) < total else str(total)
    return f"step {shown[0][1]['step']}: {part} experiences{mean}\n{table(shown, _COLUMNS)}"


def _preview(text: str) -> str:
    """How a response begins; --index shows all of it."""
    return text if len(text) <= _PREVIEW else text[:_PREVIEW] + "..."


def _decimal(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else "-"


def versions(value: Any) -> str:
    """Weights that sampled a response: "12", or which tokens by which as "11:0-57 12:57-80"; "-" for none."""
    if not isinstance(value, list) or not value:
        return "-"
    try:
        if len(value) == 1:
            return str(value[0][0])
        return " ".join(f"{version}:{first}-{end}" for version, first, end in value)
    except (TypeError, ValueError, LookupError):
        return json.dumps(value)


def moves(value: Any) -> str:
    """Where an episode came to another explorer: "turn 4: a -> b". What says something else is shown as it is."""
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
        if key not in (*_TEXTS, _ARRAYS)
    }
    lines = [f"experience {index} of {total}", pairs(fields)]
    for key in _TEXTS:
        lines += ["", visible(f"--- {key}: {row.get(f'{key}_tokens', '?')} tokens ---")]
        lines.append(visible(str(row.get(key, "")), layout=True))
    return "\n".join(lines)
