"""Checks rows of tasksets as their workflows and reward functions read them."""

import json
import math
import re
from collections.abc import Callable, Sequence

from trinity.config import Plan, Problem
from trinity.config.names import reward_functions, reward_named, workflows
from trinity.config.schema.buffer import TasksetConfig
from trinity.config.workflows import EPISODE_WORKFLOWS, R3L_WORKFLOWS, reads_prompt, scored_by
from trinity.data import images
from trinity.data.datasets import DatasetError, Row, check_columns, features
from trinity.data.json_objects import DEEPEST, is_too_deep
from trinity.data.prompts import prompt_messages, reference_answers

_SHOWN_ROWS = 3
_MOST_ROW_BYTES = 6 * 1024**2  # as JSON; a message of NATS has 8 MiB
# Built-in reward functions that compare a reply with the row's reference answer.
_COMPARING = ("accuracy_reward", "math_reward", "math_boxed_reward", "math_dapo_reward")
# Lists and mappings as csv and json.dumps of a table write them.
_WRITTEN_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")
_WRITTEN_REFERENCE = re.compile(r"""\s*\{\s*('\w+'|"style"|"ground_truth")\s*:""")


def check_tasks(plan: Plan, key: str, taskset: TasksetConfig, rows: Sequence[Row]) -> list[Problem]:
    """Raises DatasetError for the rows that their workflow or reward function could not read."""
    form = taskset.format
    workflow, reward = names_for(plan, key, taskset)
    plays = workflow in EPISODE_WORKFLOWS or workflow in R3L_WORKFLOWS  # environments read rows by themselves
    if not plays and not any(form.prompt_key in row for row in rows):
        what = f"the rows have no column {form.prompt_key!r}; they have {', '.join(rows[0])}"
        return [Problem(f"{key}.format.prompt_key", what)]
    check_columns(form, rows)
    features(rows, taskset.data_selector.feature_keys)
    rewards = _rewards(rows, form.reward_fn_key)

    def check_row(row: Row, number: int) -> None:
        check_text(row, number)
        check_size(row, number, form.image_key)
        here = _named(row, number, form.workflow_key, workflows()) or workflow
        function = scored_by(here, rewards[number] or reward)
        if reads_prompt(here):
            _prompt(row, number, form.prompt_key, form.image_key)
        if form.system_prompt_key and row.get(form.system_prompt_key) not in (None, ""):
            _text(row, number, form.system_prompt_key, "the system prompt")
        if function in _COMPARING and reads_prompt(here):
            _answers(row, number, form.response_key, f"the reference answer, which {function} compares with")

    check_each(rows, check_row)
    return []


def check_each(rows: Sequence[Row], check: Callable[[Row, int], None]) -> None:
    """Raises DatasetError with what a check says of the first row that it refuses, and the numbers of the others."""
    first, others = "", list[int]()
    for number, row in enumerate(rows):
        try:
            check(row, number)
        except DatasetError as error:
            others += [number] if first else []
            first = first or error.message
    if others:
        more = f" and {len(others) - _SHOWN_ROWS} more" if len(others) > _SHOWN_ROWS else ""
        first += f"; row(s) {', '.join(map(str, others[:_SHOWN_ROWS]))}{more} are refused too: mend or remove them"
    if first:
        raise DatasetError(first)


def names_for(plan: Plan, key: str, taskset: TasksetConfig) -> tuple[str, str]:
    """Returns workflow and reward function of the taskset at this key of the YAML."""
    source = plan.config.buffer.explorer_input
    return source.workflow_of(taskset, ".eval_tasksets" in key), source.reward_of(taskset)


def check_text(row: Row, number: int) -> None:
    """Raises DatasetError for half of a surrogate pair, which no tokenizer accepts, and for too deep nesting."""
    try:
        text = json.dumps(row, ensure_ascii=False, default=str)
        text.encode()
    except RecursionError:
        raise DatasetError(f"row {number}: is nested too deeply") from None
    except UnicodeEncodeError:
        raise DatasetError(f"row {number}: has half of a surrogate pair (\\ud800 to \\udfff); remove it") from None
    if is_too_deep(text, row):
        raise DatasetError(f"row {number}: is nested more than {DEEPEST} deep")


def check_size(row: Row, number: int, images: str | None) -> None:
    """Raises DatasetError if a row without its images exceeds a message: it becomes a task's `row_json`."""
    size = len(json.dumps({key: value for key, value in row.items() if key != images}, default=str))
    if size > _MOST_ROW_BYTES:
        raise DatasetError(
            f"row {number}: has {size / 2**20:.1f} MiB as JSON, a task may have {_MOST_ROW_BYTES >> 20} MiB"
        )


def _named(row: Row, number: int, column: str, known: Sequence[str]) -> str:
    """Returns the name in a column of names; empty without one."""
    name = row.get(column) if column else None
    if name and name not in known:
        raise DatasetError(f"row {number}: {column!r} is {name!r:.100}; known: {', '.join(known)}")
    return name or ""


def _rewards(rows: Sequence[Row], column: str) -> list[str]:
    """The reward function that each row names; empty without one. Raises DatasetError with all unknown names."""
    named = [reward_named(str(row.get(column) or "")) if column else "" for row in rows]
    known = reward_functions()
    if unknown := [number for number, name in enumerate(named) if name and name not in known]:
        names = list(dict.fromkeys(named[number] for number in unknown))
        others = f" (other rows: {', '.join(map(repr, names[1:]))})" if names[1:] else ""
        what = f"row {unknown[0]}: {column!r} is {names[0]!r:.100}{others}; known: {', '.join(known)}"
        raise DatasetError(
            f"{what}, and no data source of veRL with a scorer here; register a reward function of that name "
            "(docs/plugins.md), or remove format.reward_fn_key: then default_reward_fn_type scores every row"
        )
    return named


def _answers(row: Row, number: int, column: str, what: str) -> None:
    """Raises DatasetError unless the column has a text, a number, or a list of them."""
    value = row.get(column)
    if not isinstance(value, list | dict):
        _text(row, number, column, what)
        _check_unwritten(row, number, column, _WRITTEN_REFERENCE, "a mapping")
        return
    try:
        texts = reference_answers(value)
    except ValueError as error:
        raise DatasetError(f"row {number}: {column!r} {error}: {what}") from None
    if not all(text.strip() for text in texts):
        raise DatasetError(f"row {number}: {column!r} has an empty text, must have texts: {what}")


def _prompt(row: Row, number: int, column: str, image_key: str | None) -> None:
    if column != image_key and not isinstance(row.get(column), list):
        _text(row, number, column, "the prompt")
        _check_unwritten(row, number, column, _WRITTEN_MESSAGES, "a list of messages")
        return
    try:
        prompt_messages(images.as_text(row.get(column), column) if column == image_key else row[column])
    except DatasetError as error:
        raise DatasetError(f"row {number}: {error}") from None
    except ValueError as error:
        raise DatasetError(f"row {number}: {column!r} {error}") from None


def _check_unwritten(row: Row, number: int, column: str, written: re.Pattern[str], what: str) -> None:
    """Raises DatasetError for a text that is a list or mapping, written as text."""
    if written.match(text := str(row[column])):
        found = f"is {what} written as text, {text[:40]!r}"
        raise DatasetError(
            f"row {number}: {column!r} {found}; save the rows as jsonl or parquet, which keep lists and mappings"
        )


def _text(row: Row, number: int, column: str, what: str) -> None:
    value = row.get(column)
    missing = isinstance(value, float) and not math.isfinite(value)  # as tables say that there is nothing
    if missing or isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        found = f"{value!r:.200}" if column in row else "missing"
        raise DatasetError(f"row {number}: {column!r} is {found}, must be text: {what}")
