"""`trinity deadletters`: the failed tasks of a run. They can be listed at any time; only a live run can retry them."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import experience_pb2
from trinity.cli.commands.reader import JobStage, answer, any_buffer, live_buffer
from trinity.cli.errors import RunError
from trinity.cli.supervise import job as jobs
from trinity.cli.tail import visible
from trinity.runtime import files

_WIDTH = 140
_CALL_SECONDS = 60.0
_JSON_FIELDS = ("row", "format", "workflow_args", "reward_args")
_TASK_FIELDS = (
    "task_id",
    "ordinal",
    "life",
    "taskset",
    "epoch",
    "workflow",
    "reward_function",
    "repeat_times",
    "gate_step",
    "timeout_seconds",
    "max_attempts",
)

Letter = dict[str, Any]


def list_letters(job_stage: JobStage, limit: int, as_json: bool) -> str:
    """All letters, oldest first."""
    letters = asyncio.run(_read(job_stage, pb.ListDeadLettersRequest(run=job_stage.run, limit=limit)))
    if as_json:
        return _json([brief(letter) for letter in letters])
    if not letters:
        return f"{job_stage.name}: no dead letters"
    return table(job_stage.name, [brief(letter) for letter in letters], limit)


def show_letter(job_stage: JobStage, ordinal: int, as_json: bool) -> str:
    """One letter with all fields of its task. RunError if the task has none."""
    (letter,) = asyncio.run(_read(job_stage, pb.ListDeadLettersRequest(run=job_stage.run, ordinal=ordinal)))
    return _json(whole(letter)) if as_json else describe(whole(letter))


@dataclass(frozen=True)
class Change:
    """`retry` requeues tasks, `drop` deletes their letters: those of `ordinals`, or all with `everything`."""

    command: Literal["retry", "drop"]
    ordinals: Sequence[int]
    everything: bool

    def check(self) -> None:
        """RunError unless exactly one of ordinals and --all is given."""
        if bool(self.ordinals) == self.everything:
            raise RunError(
                f"name the tasks by ordinal, as `trinity deadletters {self.command} 3 7`, or all of them by --all; "
                "`trinity deadletters list` shows them",
                code=2,
            )


def change_letters(job_stage: JobStage, change: Change, as_json: bool) -> str:
    """Apply a change; returns what was changed. RunError unless the run is live and all ordinals have letters."""
    change.check()
    ordinals = asyncio.run(_change(job_stage, change))
    if as_json:
        return _json({"retried" if change.command == "retry" else "dropped": ordinals})
    if not ordinals:
        return f"{job_stage.name}: no dead letters, nothing to {change.command}"
    said = "fed again" if change.command == "retry" else "letters dropped"
    return f"{said}: {', '.join(map(str, ordinals))}"


async def _read(job_stage: JobStage, request: pb.ListDeadLettersRequest) -> list[experience_pb2.AttemptFailure]:
    async with any_buffer(job_stage) as reader:
        return list((await answer(reader.stub.ListDeadLetters(request, timeout=_CALL_SECONDS))).dead_letters)


async def _change(job_stage: JobStage, change: Change) -> list[int]:
    async with live_buffer(job_stage) as reader:
        if reader is None:
            raise RunError(not_live(job_stage, change.command))
        run, ordinals, stub = job_stage.run, change.ordinals, reader.stub
        if change.command == "retry":
            retry = pb.RetryDeadLettersRequest(run=run, ordinals=ordinals)
            return list((await answer(stub.RetryDeadLetters(retry, timeout=_CALL_SECONDS))).ordinals)
        drop = pb.DropDeadLettersRequest(run=run, ordinals=ordinals)
        return list((await answer(stub.DropDeadLetters(drop, timeout=_CALL_SECONDS))).ordinals)


def not_live(job_stage: JobStage, command: str) -> str:
    """The reason why letters cannot be changed now, and the fix."""
    main = jobs.read_records(job_stage.job).get("main")
    if main is not None:
        return (
            f"stage {job_stage.stage!r} of {job_stage.job} does not run now, {main.stage!r} does; --stage names another"
        )
    again = "`trinity run` with the same YAML"
    if isinstance(files.read_json(job_stage.job / "summary.json"), dict):
        again += " and more steps (buffer.total_steps=...)"
    return f"{job_stage.name} does not run, and letters are the running buffer's: {again}, then {command} again"


def brief(letter: experience_pb2.AttemptFailure) -> Letter:
    """The fields that a list shows."""
    return {
        "ordinal": letter.task.ordinal,
        "task_id": letter.task.task_id,
        "cause": letter.cause,
        "attempts": letter.attempt,
        "error": next(iter(letter.error.strip().splitlines()), ""),
        "failed_at_seconds": letter.failed_at_seconds,
    }


def whole(letter: experience_pb2.AttemptFailure) -> Letter:
    """All fields: the failure, the task, its row."""
    task: Letter = {name: getattr(letter.task, name) for name in _TASK_FIELDS}
    task["row_number"] = letter.task.row
    task |= {name: _parsed(getattr(letter.task, f"{name}_json")) for name in _JSON_FIELDS}
    sampling = letter.task.sampling
    task["sampling"] = {field.name: _plain(value) for field, value in sampling.ListFields()}
    about = {**brief(letter), "error": letter.error, "explorer": letter.explorer_id}
    return {**about, "task": task}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) else list(value)


def table(name: str, letters: Sequence[Letter], limit: int) -> str:
    """A text table, one line for each letter."""
    more = f", the oldest; --limit {2 * limit} shows more" if len(letters) == limit else ""
    drawn = Table(
        title=Text(f"{name}: {len(letters)} dead letters{more}"), title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    for column in ("ordinal", "attempts"):
        drawn.add_column(column, justify="right", no_wrap=True)
    drawn.add_column("task", overflow="fold")
    for column in ("when", "cause"):
        drawn.add_column(column, no_wrap=True)
    drawn.add_column("error", no_wrap=True, overflow="ellipsis", ratio=1, min_width=20)
    for letter in letters:
        cells = (
            str(letter["ordinal"]),
            str(letter["attempts"]),
            letter["task_id"] or "(unknown)",
            when(letter["failed_at_seconds"]),
            letter["cause"],
            letter["error"],
        )
        drawn.add_row(*(Text(visible(cell)) for cell in cells))
    console = Console(width=_WIDTH)
    with console.capture() as capture:
        console.print(drawn)
    return capture.get().rstrip()


def describe(letter: Letter) -> str:
    """All fields of one letter as text."""
    task = letter["task"]
    facts = {
        "task": letter["task_id"] or "(unknown)",
        "ordinal": letter["ordinal"],
        "cause": letter["cause"],
        "attempts": f"{letter['attempts']} of {task['max_attempts']}, in life {task['life'] + 1}",
        "when": when(letter["failed_at_seconds"]),
        "explorer": letter["explorer"] or "-",
        "taskset": f"{task['taskset']}, epoch {task['epoch']}, row {task['row_number']}",
        "workflow": f"{task['workflow']} {_short(task['workflow_args'])}".strip(),
        "reward": f"{task['reward_function'] or '(the workflow chooses)'} {_short(task['reward_args'])}".strip(),
        "rollouts": task["repeat_times"],
        "gate": f"weights of step {task['gate_step']} or newer",
        "time limit": f"{task['timeout_seconds']:g} s",
        "sampling": json.dumps(task["sampling"]),
    }
    width = max(map(len, facts))
    lines = [f"{name:<{width}}  {visible(str(value))}" for name, value in facts.items()]
    lines += ["", "--- error ---", visible(letter["error"], layout=True)]
    lines += ["", "--- row ---", visible(json.dumps(task["row"], indent=1, ensure_ascii=False), layout=True)]
    return "\n".join(lines)


def when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"


def _short(args: Any) -> str:
    return json.dumps(args) if args else ""


def _json(value: Any) -> str:
    """DEL is the one control character JSON lets through."""
    return json.dumps(value, indent=1).replace("\x7f", "\\u007f")
