"""Finds the first place at which two runs differ: step, task, rollout, token, metric or weight (`trinity bisect`).

It reads the files that trainers wrote into the two stage folders. Neither run has to live.
"""

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trinity.reading.errors import RunError
from trinity.runtime import files
from trinity.weights.checkpoints import data_begin, safetensors_header

_METRICS = Path("monitor", "trainer.jsonl")
_TRAINED = Path("buffer", "experience_buffer.jsonl")
_ARRAYS = {"token_ids": "<i4", "mask": "u1", "logprobs": "<f4"}
_VALUES = ("versions", "prompt_tokens", "response_tokens", "truncation")
_LEARNT = ("reward", "advantage")
_NUMBERS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

_COMPARED = ("actor/", "sample/")  # follow from batch and weights; times do not

Metrics = dict[str, float | None]
Key = tuple[int, int, int]  # ordinal of the task, rollout, turn


@dataclass(frozen=True)
class Difference:
    """`where`: from the task down to the token. `a` and `b` are the two values; None where a run has none."""

    step: int
    where: str
    a: Any
    b: Any


def compare(a: Path, b: Path) -> tuple[list[int], Difference | None]:
    """Returns the compared steps and the first difference. Raises RunError if the runs share no step."""
    for folder in (a, b):
        _check(folder)
    runs = [_Run(folder) for folder in (a, b)]
    common = sorted(runs[0].metrics.keys() & runs[1].metrics.keys())
    if not common:
        raise RunError(f"{a} and {b} have no trained step in common ({_METRICS})", 2)
    for step in common:
        for difference in _of_step(step, *runs):
            return common, difference
    last = [max(run.metrics) for run in runs]
    if last[0] != last[1]:
        return common, Difference(common[-1], "the last step", *last)
    return common, None


def _check(folder: Path) -> None:
    """Raises RunError unless a trainer wrote metrics into the folder. For a job with stages, the error names them."""
    if (folder / _METRICS).exists():
        return
    if not folder.is_dir():
        raise RunError(f"no folder {folder}; give the folder of a stage, or of a job without stages", 2)
    stages = [path.parent.parent for path in sorted(folder.glob(f"*/{_METRICS}"))]
    if stages:
        raise RunError(f"{folder} has stages; give the folder of one: {', '.join(map(str, stages))}", 2)
    raise RunError(f"{folder} has no trained step ({_METRICS})", 2)


class _Run:
    """The steps of one stage folder. A step that was trained twice counts as trained last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = metrics_by_step(folder)
        self.experiences: dict[int, dict[Key, dict[str, Any]]] = {}
        for line in lines_of_steps(folder / _TRAINED):
            try:
                key, row = _read(line)
            except (LookupError, TypeError, ValueError, OverflowError) as error:
                problem = f"{folder / _TRAINED}: a line of step {line['step']} cannot be read: {error!r}"
                raise RunError(problem, 2) from None
            self.experiences.setdefault(line["step"], {})[key] = row

    def weights(self, step: int) -> dict[str, Path]:
        """Returns the files of a step's version, by name; empty if they are gone."""
        return {path.name: path for path in sorted((self.folder / f"weights/v{step}").glob("*.safetensors"))}


def _read(line: dict[str, Any]) -> tuple[Key, dict[str, Any]]:
    """Reads a line with its arrays, and `sampled_by`: the versions that sampled it.

    Version spans end with the response, whose tokens come first. Raises LookupError, TypeError, ValueError or
    OverflowError if the line is damaged.
    """
    arrays = {
        name: np.frombuffer(base64.b64decode(line["arrays"][name], validate=True), dtype)
        for name, dtype in _ARRAYS.items()
    }
    sampled_by = [span[0] for span in line.get("versions") or ()]
    key = int(line["ordinal"]), int(line["rollout"]), int(line["turn"])
    return key, {**line, "arrays": arrays, "sampled_by": sampled_by, "prompt_tokens": int(line["prompt_tokens"])}


def _of_step(step: int, a: _Run, b: _Run) -> Iterator[Difference]:
    """Yields differences of a step in causal order. The first one is complete."""
    one, other = (run.experiences.get(step, {}) for run in (a, b))
    for key in sorted(one.keys() | other.keys()):
        for where, mine, theirs in _of_experience(one.get(key), other.get(key)):
            yield Difference(step, where, mine, theirs)
    before, after = a.metrics[step], b.metrics[step]
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield Difference(step, name, before.get(name), after.get(name))
    files, theirs_too = a.weights(step), b.weights(step)
    for name in files.keys() & theirs_too.keys():
        yield from (Difference(step, *found) for found in _of_weights(files[name], theirs_too[name]))


def _of_experience(one: dict[str, Any] | None, other: dict[str, Any] | None) -> Iterator[tuple[str, Any, Any]]:
    known = one or other or {}
    place = f"task {known.get('task_id')}, rollout {known.get('rollout')}, turn {known.get('turn')}"
    if one is None or other is None:
        yield place, "there" if one else None, "there" if other else None
        return
    for name, field in (("task_id", "task_id"), ("versions", "sampled_by")):
        if one.get(field) != other.get(field):
            yield f"{place}, {name}", one.get(field), other.get(field)
    for name in _ARRAYS:
        mine, theirs = one["arrays"][name], other["arrays"][name]
        index = _first_difference(mine, theirs)
        if index is not None:
            first = 0 if name == "token_ids" else one["prompt_tokens"]  # of the arrays of responses
            yield f"{place}, token {index + first}, {name}", _at(mine, index), _at(theirs, index)
    for name in (*_VALUES, *_LEARNT):
        if one.get(name) != other.get(name):
            yield f"{place}, {name}", one.get(name), other.get(name)


def _of_weights(one: Path, other: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yields the first differing element of each tensor. 16-bit floats that numpy lacks are shown as bits."""
    headers = [safetensors_header(path) for path in (one, other)]
    starts = [data_begin(path) for path in (one, other)]
    for name in sorted(headers[0].keys() | headers[1].keys()):
        dtypes = [header[name]["dtype"] if name in header else None for header in headers]
        if dtypes[0] != dtypes[1]:
            yield f"weight {name}", dtypes[0], dtypes[1]
            continue
        dtype = np.dtype(_NUMBERS.get(str(dtypes[0]), "u1"))
        mine, theirs = (
            _bytes(path, start, *header[name]["data_offsets"])
            for path, start, header in zip((one, other), starts, headers, strict=True)
        )
        index = _first_difference(mine, theirs)
        if index is not None:
            element = index // dtype.itemsize
            values = [_at(_elements(raw, dtype), element) for raw in (mine, theirs)]
            yield f"weight {name}, element {element}", *values


def _elements(raw: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Views bytes as elements, without the incomplete last element of a damaged tensor."""
    return raw[: len(raw) // dtype.itemsize * dtype.itemsize].view(dtype)


def _bytes(path: Path, start: int, begin: int, end: int) -> np.ndarray:
    return np.fromfile(path, np.uint8, end - begin, offset=start + begin)


def _first_difference(mine: np.ndarray, theirs: np.ndarray) -> int | None:
    """Compares by bits: NaN equals NaN, and 0 does not equal -0."""
    if mine.tobytes() == theirs.tobytes():
        return None
    size = min(len(mine), len(theirs))
    bits: Callable[[np.ndarray], np.ndarray] = lambda array: array[:size].view(f"u{array.dtype.itemsize}")  # noqa: E731
    different = np.flatnonzero(bits(mine) != bits(theirs))
    return int(different[0]) if len(different) else size


def _at(array: np.ndarray, index: int) -> Any:
    return array[index].item() if index < len(array) else None


def metrics_by_step(folder: Path) -> dict[int, Metrics]:
    """Returns the metrics that are compared, by step."""
    return {
        int(line["step"]): {name: value for name, value in line.items() if _is_compared(name, value)}
        for line in lines_of_steps(folder / "monitor" / "trainer.jsonl")
    }


def _is_compared(name: str, value: Any) -> bool:
    return name.startswith(_COMPARED) and isinstance(value, (int, float, type(None)))


def lines_of_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file that name a step, without truncated and damaged lines."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    yield from (line for line in files.json_lines(lines) if type(line.get("step")) is int)
