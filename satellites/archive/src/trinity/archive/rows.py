"""One experience as one flat row, with the same columns in SQL, JSON lines and parquet. The conversion is lossless.

A row is a mapping. `rows_of` fills it with numpy arrays and plain objects. Each kind of archive writes these in its
form (lists, bytes, JSON text), and `group_of` reads all forms. Rows written by hand need only the REQUIRED columns.

The functions that read columns were measured against a pydantic TypeAdapter. It is as fast (288 us for 4,100 tokens,
ours 296 us). It accepts half surrogate pairs, which protobuf cannot hold, and reports an integer beyond float64 as "no
number". It would still need the readers of arrays and a table of messages.
"""

import base64
import contextlib
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from enum import StrEnum
from typing import Any

import numpy as np

from trinity.data.experience import Experience, Group, SamplingParams, Task, TaskKind, Truncation, VersionSpan
from trinity.data.images import PlacedImage, digest
from trinity.data.wire import task_from_json, task_to_json
from trinity.runtime.errors import InvalidInput

ExperienceRow = Mapping[str, Any]

# Column -> type: text, json (a list or an object), int32, int64, float64, or the dtype of an array. SQL and parquet map
# these to their own types. An Arrow schema here would make pyarrow a requirement of the buffer.
TYPES = {
    "run": "text",
    "log_sequence": "int64",
    "index_in_group": "int32",  # from 0; with run and log_sequence the identity of an experience
    "group_size": "int32",  # experiences in the group
    "task_id": "text",
    "ordinal": "int64",
    "attempt": "int32",
    "explorer_id": "text",
    "rollout": "int32",
    "step": "int32",
    "prompt_length": "int32",
    "reward": "float64",
    "truncation": "int32",
    "token_ids": "<i4",
    "logprobs": "<f4",
    "action_mask": "|b1",
    "teacher_logprobs": "<f4",  # null without a teacher
    "version_spans": "json",  # [[version, start, end, precision], ...]
    "metrics": "json",  # an object
    "info": "text",  # the workflow's JSON, kept as it wrote it
    "prompt_text": "text",
    "response_text": "text",
    "task": "json",  # protobuf's JSON of trinity.api.common.v1.Task
    "started_at_seconds": "float64",
    "finished_at_seconds": "float64",
    "images": "json",  # [[first placeholder, file], ...]: base64, or sha256:<hex> of an image of the task
}
COLUMNS = tuple(TYPES)
# An archive without this column reads as one without images, and is continued.
LATER = "images"
OLDER_COLUMNS = tuple(column for column in COLUMNS if column != LATER)
KEY = ("run", "log_sequence", "index_in_group")
ARRAYS = {column: kind for column, kind in TYPES.items() if kind[0] in "<|"}
OBJECTS = tuple(column for column, kind in TYPES.items() if kind == "json")
REQUIRED = ("token_ids", "prompt_length", "reward")

_NAMED = "sha256:"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,49}")
_SCHEMES = ("sqlite", "postgresql", "postgres")


class Kind(StrEnum):
    SQL = "sql"
    JSONL = "jsonl"
    PARQUET = "parquet"


def kind_of(path: str) -> Kind:
    """The kind of archive that a path names. Raises InvalidInput for other paths."""
    scheme, found, _ = path.partition("://")
    if found and scheme.partition("+")[0] in _SCHEMES:
        return Kind.SQL
    if not found and path.endswith((".db", ".sqlite")):
        return Kind.SQL
    if not found and path.endswith(".jsonl"):
        return Kind.JSONL
    if not found and path.endswith((".parquet", "/")):
        return Kind.PARQUET
    shown = f"a {scheme}:// URL" if found else repr(path)  # a URL may hold a password
    raise InvalidInput(
        "path",
        f"is {shown}; an archive is a URL (sqlite:///file.db, postgresql://user:password@host/database), "
        "a file .db, .sqlite or .jsonl, or a folder of parquet files (its path ends in .parquet or /)",
    )


@contextlib.contextmanager
def needed_from(package: str) -> Iterator[None]:
    """Wraps the import of a kind. Raises InvalidInput with the package to install if one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).startswith("trinity"):
            raise
        raise InvalidInput("path", f"needs {error.name}; pip install -e '{package}'") from None


def check_table_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidInput("name", f"is {name!r}; a table has 1 to 50 letters, digits, _ and -, and no digit in front")


def not_archived(groups: Iterable[tuple[int, Group]], archived: int, position: int) -> list[tuple[int, Group]]:
    """The groups above `archived`. Raises ValueError unless they are in log order and none is above `position`."""
    groups = list(groups)
    sequences = [sequence for sequence, _ in groups]
    if sequences != sorted(set(sequences)) or (sequences and sequences[-1] > position):
        raise ValueError(f"log sequences {sequences} must rise and end at or below position {position}")
    return [(sequence, group) for sequence, group in groups if sequence > archived]


def rows_of(run: str, groups: Iterable[tuple[int, Group]]) -> list[dict[str, Any]]:
    """Rows of groups, in order of log sequence. Raises InvalidInput for a group without experiences."""
    return [row for sequence, group in groups for row in _rows_of_group(run, sequence, group)]


def _rows_of_group(run: str, sequence: int, group: Group) -> Iterable[dict[str, Any]]:
    if not group.experiences:
        raise InvalidInput("group.experiences", f"of task {group.task.task_id} is empty; there is nothing to archive")
    task, of_task = task_to_json(group.task), set(group.task.images)
    for index, experience in enumerate(group.experiences):
        values = {
            "run": run,
            "log_sequence": sequence,
            "index_in_group": index,
            "group_size": len(group.experiences),
            "task_id": group.task.task_id,
            "ordinal": group.task.ordinal,
            "attempt": group.attempt,
            "explorer_id": group.explorer_id,
            "version_spans": [list(vars(span).values()) for span in experience.version_spans],
            "truncation": int(experience.truncation),
            "metrics": {name: number(value) for name, value in experience.metrics.items()},
            "info": experience.info_json,
            "task": task,
            "images": [[image.start, _image_text(image, of_task)] for image in experience.images],
            "started_at_seconds": group.started_at_seconds,
            "finished_at_seconds": group.finished_at_seconds,
        }
        yield {column: values[column] if column in values else getattr(experience, column) for column in COLUMNS}


def _image_text(image: PlacedImage, of_task: Set[bytes]) -> str:
    named = image.file in of_task  # each row has the task with its images
    return f"{_NAMED}{image.digest.hex()}" if named else base64.b64encode(image.file).decode()


def number(value: float) -> float | str:
    """A float for JSON. NaN and the infinities are text, as in protobuf's JSON."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def group_of(rows: Sequence[tuple[str, ExperienceRow]], made_up_task: str) -> Group:
    """The group of rows, each given with its place for error messages.

    `made_up_task` is the task's id if the rows name no task. Defaults of missing columns: logprobs 0, action_mask all
    true, the response sampled by version 0, rollouts in the order of the rows. Raises InvalidInput naming place,
    column, value and rule.
    """
    if all(row.get("index_in_group") is not None for _, row in rows):
        rows = sorted(rows, key=lambda pair: _integer(pair[1], "index_in_group", pair[0]))
    place, first = rows[0]
    task = _task(first, place, made_up_task, len(rows))
    files = {f"{_NAMED}{digest(file).hex()}": file for file in task.images}
    experiences = tuple(_experience(row, place, index, files) for index, (place, row) in enumerate(rows))
    return Group(
        task=task,
        attempt=_integer(first, "attempt", place, 1),
        explorer_id=_text(first, "explorer_id", place),
        experiences=experiences,
        started_at_seconds=_float(first, "started_at_seconds", place, 0.0),
        finished_at_seconds=_float(first, "finished_at_seconds", place, 0.0),
    )


def check_row(row: ExperienceRow, place: str) -> None:
    """Raises InvalidInput, as `group_of` does, unless the row is an experience that can be trained."""
    for column in REQUIRED:
        if row.get(column) is None:
            needed = f"is missing; needed are {', '.join(REQUIRED)}, there are {', '.join(row)}"
            raise wrong(place, column, f"{needed}; give an archive (docs/experience.md#archives)")
    (experience,) = group_of([(place, row)], "none").experiences
    experience.check(f"{place}: experience")
    for column in ("run", "task_id"):
        _text(row, column, place)
    _integer(row, "log_sequence", place, 0)


def wrong(place: str, column: str, problem: str) -> InvalidInput:
    return InvalidInput(f"{place}, column {column}", problem)


def grouped(rows: Iterable[tuple[int, ExperienceRow]], place: Callable[[int], str]) -> list["array[int]"]:
    """Row numbers of each group, in the order of their first rows. A row without task_id is a group.

    Raises InvalidInput, with the place of the row, for a step that its rollout has already.
    """
    groups: list[array[int]] = []
    seen: dict[tuple[Any, ...], int] = {}
    steps: set[tuple[int, int, int]] = set()
    for row_number, row in rows:
        key = (row.get("run"), row.get("task_id"), row.get("log_sequence"))
        if row.get("task_id") is None or key not in seen:
            seen[key] = len(groups)
            groups.append(array("q"))
        members = groups[seen[key]]
        rollout, step = row.get("rollout"), row.get("step") or 0
        rollout = len(members) if rollout is None else rollout
        if (seen[key], rollout, step) in steps:
            problem = f"is {rollout}, and its group has step {step} of that rollout before; number the rollouts"
            raise wrong(place(row_number), "rollout", problem)
        steps.add((seen[key], rollout, step))
        members.append(row_number)
    return groups


def _experience(row: ExperienceRow, place: str, index: int, files: Mapping[str, bytes]) -> Experience:
    """files: the task's images, by their names in rows."""
    token_ids = _array(row, "token_ids", place)
    prompt_length = _integer(row, "prompt_length", place)
    response = len(token_ids[max(0, prompt_length) :])  # Experience.check refuses a negative length
    spans = _object(row, "version_spans", place, [[0, 0, response]] if response else [])
    metrics = _object(row, "metrics", place, {})
    truncation = _integer(row, "truncation", place, int(Truncation.NONE))
    if truncation not in list(Truncation):
        raise wrong(place, "truncation", f"is {truncation}, must be 1 (none), 2 (prompt) or 3 (response)")
    return Experience(
        rollout=_integer(row, "rollout", place, index),
        step=_integer(row, "step", place, 0),
        token_ids=token_ids,
        prompt_length=prompt_length,
        logprobs=_array(row, "logprobs", place, np.zeros(response, np.float32)),
        action_mask=_array(row, "action_mask", place, np.ones(response, bool)),
        reward=_float(row, "reward", place),
        version_spans=tuple(_span(span, place) for span in spans),
        truncation=Truncation(truncation),
        metrics={
            _encodable(name, "metrics", place): _float(metrics, name, place)
            for name in metrics
            if metrics[name] is not None
        },
        info_json=_text(row, "info", place),
        teacher_logprobs=None if row.get("teacher_logprobs") is None else _array(row, "teacher_logprobs", place),
        prompt_text=_text(row, "prompt_text", place),
        response_text=_text(row, "response_text", place),
        images=tuple(_image(image, place, files) for image in _object(row, "images", place, [])),
    )


def _task(row: ExperienceRow, place: str, made_up: str, size: int) -> Task:
    if row.get("task") is None:
        return _made_up_task(_text(row, "run", place), _text(row, "task_id", place) or made_up, size)
    fields = _object(row, "task", place, {})
    try:
        return task_from_json(fields)
    except InvalidInput as error:
        raise wrong(place, "task", f"is no trinity.api.common.v1.Task as protobuf writes it in JSON: {error}") from None


def _made_up_task(run: str, task_id: str, size: int) -> Task:
    """The task of rows without one. It stands for the prompt and cannot be explored."""
    return Task(
        run=run,
        task_id=task_id,
        ordinal=0,
        kind=TaskKind.TRAIN,
        taskset="offline",
        epoch=0,
        row=0,
        row_json="{}",
        format_json="{}",
        workflow="offline",
        workflow_args_json="{}",
        reward_function="",
        reward_args_json="{}",
        repeat_times=size,
        sampling=SamplingParams(),
        gate_step=0,
        evaluation_step=0,
        timeout_seconds=1.0,
        max_attempts=1,
    )


def _array(row: ExperienceRow, column: str, place: str, default: np.ndarray | None = None) -> np.ndarray:
    value, dtype = row.get(column), np.dtype(ARRAYS[column])
    if value is None and default is not None:
        return default
    if isinstance(value, (bytes, memoryview)):
        if len(value) % dtype.itemsize:
            raise wrong(place, column, f"has {len(value)} bytes, must be a multiple of {dtype.itemsize}")
        return np.frombuffer(value, dtype)
    return _converted(value, column, place, dtype)


def _converted(value: Any, column: str, place: str, dtype: np.dtype[Any]) -> np.ndarray:
    """A list as an array of `dtype`. Integers keep their values; floats become the nearest float32."""
    kinds = {"token_ids": "iu", "action_mask": "iub"}.get(column, "iufU")
    rule = {"token_ids": "ids (int32)", "action_mask": "true or false"}.get(column, "numbers")
    try:
        given = np.asarray(value)
    except ValueError:  # lists of different lengths
        given = np.zeros(())
    if isinstance(value, (list, np.ndarray)) and given.shape == (0,):
        return given.astype(dtype)
    if given.ndim != 1 or given.dtype.kind not in kinds:
        raise wrong(place, column, f"is {_shown(value)}, must be a list of {rule}")
    try:
        array = given.astype(dtype)
    except ValueError:
        raise wrong(place, column, f"is {_shown(value)}, must be a list of {rule}") from None
    if dtype.kind != "f" and not np.array_equal(array, given):
        bad = given[array != given][0]
        raise wrong(place, column, f"has {bad}, must be a list of {rule}")
    return array


def _object(row: ExperienceRow, column: str, place: str, default: Any) -> Any:
    value = row.get(column)
    if value is None:
        return default
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise wrong(place, column, f"is not JSON: {error}") from None
    if not isinstance(value, type(default)):
        raise wrong(
            place, column, f"is {_shown(value)}, must be {'a list' if isinstance(default, list) else 'an object'}"
        )
    return value


def _span(value: Any, place: str) -> VersionSpan:
    kinds = [type(part) for part in value] if isinstance(value, list) else []
    if kinds not in ([int, int, int], [int, int, int, str]):
        raise wrong(
            place, "version_spans", f"has {_shown(value)}, must be [version, first token, one past the last, precision]"
        )
    if value[0] >= 2**63:
        raise wrong(place, "version_spans", f"has version {value[0]}, must be below 2**63 (int64)")
    return VersionSpan(*value)


def _image(value: Any, place: str, files: Mapping[str, bytes]) -> PlacedImage:
    if not isinstance(value, list) or [type(part) for part in value] != [int, str] or not 0 <= value[0] < 2**31:
        raise wrong(place, "images", f"has {_shown(value)}, must be [position of its first placeholder, base64]")
    start, text = value
    try:
        file = files[text] if text.startswith(_NAMED) else base64.b64decode(text, validate=True)
    except KeyError:
        raise wrong(place, "images", f"has {_shown(text)}, which is no image of the row's task") from None
    except ValueError:
        raise wrong(place, "images", f"has {_shown(text)}, must be base64 of an image's file") from None
    return PlacedImage(start, file)


def _integer(row: ExperienceRow, column: str, place: str, default: int | None = None) -> int:
    value = row.get(column)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(place, column, f"is {_shown(value)}, must be a whole number")
    bits = int(TYPES[column].removeprefix("int"))
    if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        raise wrong(place, column, f"is {_shown(value)}, must fit into int{bits}")
    return value


def _float(row: ExperienceRow, column: str, place: str, default: float | None = None) -> float:
    value = row.get(column)
    if value is None and default is not None:
        return default
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong(place, column, f"is {_shown(value)}, must be a number")
    try:
        return float(value)
    except OverflowError:
        raise wrong(place, column, f"is {_shown(value)}, must fit into float64") from None


def _text(row: ExperienceRow, column: str, place: str) -> str:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise wrong(place, column, f"is {_shown(value)}, must be text")
    return _encodable(value or "", column, place)


def _encodable(text: str, column: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise wrong(place, column, "has half of a surrogate pair (\\ud800 to \\udfff); remove it") from None
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
