"""`trinity deadletters`: the failed tasks of a run. Only a live run can retry them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from trinity.commands import AsJson, command, group
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage, Reader, any_buffer, ask, find_job_stage, live_buffer, not_live
from trinity.reading.render import pairs, table, to_json, visible, when
from trinity.reading.wire import Facts, Letter

app = group("Tasks that failed for good.")

Ordinals = Annotated[list[int] | None, typer.Argument(metavar="[ORDINAL]...", help="Tasks, by their ordinals")]
All = Annotated[bool, typer.Option("--all", help="All that have a letter")]

_COLUMNS = {
    "ordinal": lambda one: one.ordinal,
    "attempts": lambda one: one.attempts,
    "task": lambda one: one.task_id or "(unknown)",
    "when": lambda one: when(one.failed_at_seconds),
    "cause": lambda one: one.cause,
    "error": lambda one: one.error,
}


@command(app, "list", find_job_stage)
def list_letters(
    job_stage: JobStage,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many, oldest first")] = 100,
    as_json: AsJson = False,
) -> str:
    """List dead letters: ordinal, task, cause, attempts and error."""
    letters = ask(any_buffer, job_stage, lambda reader: reader.buffer.letters(limit))
    if as_json:
        return to_json(letters)
    return render(job_stage.name, letters, limit) if letters else f"{job_stage.name}: no dead letters"


@command(app, "show", find_job_stage)
def show_letter(
    job_stage: JobStage,
    ordinal: Annotated[int, typer.Argument(min=1, help="The task, by its ordinal")],
    as_json: AsJson = False,
) -> str:
    """Show one dead letter with all its fields and the row of its task."""
    letter = ask(any_buffer, job_stage, lambda reader: reader.buffer.letter(ordinal))
    return to_json(letter) if as_json else describe(letter)


@command(app, "retry", find_job_stage)
def retry_letters(
    job_stage: JobStage, ordinals: Ordinals = None, everything: All = False, as_json: AsJson = False
) -> str:
    """Requeue tasks of dead letters with all their attempts. The run must be live."""
    return change_letters(job_stage, Change("retry", ordinals or [], everything), as_json)


@command(app, "drop", find_job_stage)
def drop_letters(
    job_stage: JobStage, ordinals: Ordinals = None, everything: All = False, as_json: AsJson = False
) -> str:
    """Delete dead letters; their tasks are not retried. The run must be live."""
    return change_letters(job_stage, Change("drop", ordinals or [], everything), as_json)


@dataclass(frozen=True)
class Change:
    """`retry` requeues tasks, `drop` deletes their letters: those of `ordinals`, or all with `everything`."""

    command: Literal["retry", "drop"]
    ordinals: Sequence[int]
    everything: bool

    def check(self) -> None:
        """Raises RunError unless either ordinals or --all is given."""
        if bool(self.ordinals) == self.everything:
            raise RunError(
                f"name the tasks by ordinal, as `trinity deadletters {self.command} 3 7`, or all of them by --all; "
                "`trinity deadletters list` shows them",
                code=2,
            )


def change_letters(job_stage: JobStage, change: Change, as_json: bool) -> str:
    """Applies a change and returns the changed ordinals.

    Raises RunError unless the run is live and all ordinals have letters.
    """
    change.check()
    ordinals = ask(live_buffer, job_stage, lambda reader: _change(reader, job_stage, change))
    if as_json:
        return to_json({"retried" if change.command == "retry" else "dropped": ordinals})
    if not ordinals:
        return f"{job_stage.name}: no dead letters, nothing to {change.command}"
    said = "fed again" if change.command == "retry" else "letters dropped"
    return f"{said}: {', '.join(map(str, ordinals))}"


async def _change(reader: Reader | None, job_stage: JobStage, change: Change) -> list[int]:
    if reader is None:
        raise RunError(not_live(job_stage, "letters are the running buffer's") + f", then {change.command} again")
    call = reader.buffer.retry_letters if change.command == "retry" else reader.buffer.drop_letters
    return await call(change.ordinals)


def render(name: str, letters: Sequence[Letter], limit: int) -> str:
    """Returns a line for each letter."""
    more = f", the oldest; --limit {2 * limit} shows more" if len(letters) == limit else ""
    return f"{visible(name)}: {len(letters)} dead letters{more}\n{table(letters, _COLUMNS)}"


def describe(letter: Facts) -> str:
    """Returns all fields of one letter as text."""
    task = letter["task"]
    facts = {
        "task": letter["task_id"] or "(unknown)",
        "ordinal": letter["ordinal"],
        "cause": letter["cause"],
        "attempts": f"{letter['attempts']} of {task['max_attempts']}, requeued {task['requeues']} times",
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
    lines = [pairs(facts), "", "--- error ---", visible(letter["error"], layout=True)]
    lines += ["", "--- row ---", visible(json.dumps(task["row"], indent=1, ensure_ascii=False), layout=True)]
    return "\n".join(lines)


def _short(args: Any) -> str:
    return json.dumps(args) if args else ""
