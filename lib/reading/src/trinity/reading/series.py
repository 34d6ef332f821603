"""The monitor files <stage>/monitor/<role>.jsonl: their newest lines, and the curve of each metric over all steps."""

import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trinity.reading.tail import lines_backwards, whole_end
from trinity.runtime import files

Line = dict[str, Any]


_LATE = 64  # lines between the last of a step and one of the same step that was written before, such as an evaluation


def read(folder: Path | None, role: str, steps: int) -> list[Line]:
    """Returns at most `steps` lines, oldest first; empty without a file.

    The lines of a step, for its batch and for each evaluation, are merged. For a step that was trained again, the last
    value of each metric counts.
    """
    found: dict[int, Line] = {}
    for text in _backwards(folder, role):
        line = _parse(text)
        if line is not None:
            found[line["step"]] = line | found.get(line["step"], {})
        if len(found) > steps:
            del found[min(found)]
            break
    return [found[step] for step in sorted(found)]


def at(folder: Path | None, role: str, step: int) -> Line:
    """Returns the measurements of one step, as `read`; empty without any."""
    begin, found, since = b'{"step": %d,' % step, Line(), 0
    for text in _backwards(folder, role):
        if text.startswith(begin):
            found, since = (_parse(text) or {}) | found, 0
        since += bool(found)
        if since > _LATE:
            break
    return found


def _backwards(folder: Path | None, role: str) -> Iterator[bytes]:
    if folder is None:
        return
    try:
        with (folder / "monitor" / f"{role}.jsonl").open("rb", buffering=0) as file:
            yield from lines_backwards(file, whole_end(file))
    except OSError:
        return


def _parse(text: bytes) -> Line | None:
    """Returns None for a truncated line."""
    line = next(files.json_lines([text]), {})
    return line if type(line.get("step")) is int else None


def values(lines: list[Line], name: str) -> list[float]:
    """Returns the finite values of a metric."""
    found = (line.get(name) for line in lines)
    return [float(value) for value in found if isinstance(value, (int, float))]


def newest(lines: list[Line], name: str) -> float | None:
    found = values(lines[-1:], name)
    return found[0] if found else None


ROLES = ("explorer", "trainer")
_LONGEST_SECONDS = 1e12  # a damaged time must still be JSON
BUSY = "trainer/busy"  # computed here: the share of a step's time in which the trainer's devices work
_TIMES = ("time/step", "time/wait", "time/buffer", "time/publish", "time/save")


class Curves:
    """Every metric of a stage over its steps. A call parses only the lines that were appended since the last one.

    A step that was trained again has its last values. Calls may come from several threads.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._ends = dict.fromkeys(ROLES, 0)
        self._places: dict[int, int] = {}
        self._seconds = array("d")
        self._values: dict[str, array[float]] = {}

    def names(self) -> list[str]:
        """Returns the names of all metrics, in alphabetical order."""
        with self._lock:
            self._read()
            return sorted(self._values)

    def points(self, name: str, first: int, last: int, most: int) -> list[list[float]]:
        """Returns steps, seconds since the first line, and values, at most `most` of each.

        Of more points between the two steps, each part of the curve keeps its least and its greatest value.
        """
        with self._lock:
            self._read()
            values = np.array(self._values.get(name, ()), float)
            seconds = np.array(self._seconds, float)
            steps = np.fromiter(self._places, int, len(self._places))
        places = np.flatnonzero(np.isfinite(values) & (steps[: len(values)] >= first) & (steps[: len(values)] <= last))
        places = places[np.argsort(steps[places])]
        if len(places) > most:
            parts = np.array_split(places[1:-1], max(1, most // 2 - 1))
            places = np.concatenate([places[:1], *(_ends(part, values) for part in parts), places[-1:]])
        begin = np.nanmin(seconds) if np.isfinite(seconds).any() else 0.0
        passed = np.clip(np.nan_to_num(seconds[places] - begin), 0, _LONGEST_SECONDS).round(1)
        return [steps[places].tolist(), passed.tolist(), [float(f"{value:.6g}") for value in values[places]]]

    def _read(self) -> None:
        for role in ROLES if self._folder is not None else ():
            try:
                with (self._folder / "monitor" / f"{role}.jsonl").open("rb", buffering=0) as file:  # type: ignore[operator]
                    end = whole_end(file)
                    if end < self._ends[role]:  # another file
                        self._forget()
                    file.seek(self._ends[role])
                    lines = file.read(end - self._ends[role]).splitlines()
            except OSError:
                continue
            self._ends[role] = end
            for text in lines:
                self._add(_parse(text) or {})

    def _add(self, line: Line) -> None:
        times = values([line], "time/step") and [sum(values([line], name)) for name in _TIMES]
        if times and sum(times):
            line[BUSY] = times[0] / sum(times)
        if (step := line.pop("step", None)) is None:
            return
        place = self._places.setdefault(step, len(self._places))
        for name, value in line.items():
            if isinstance(value, (int, float)):
                column = self._seconds if name == "time" else self._values.setdefault(name, array("d"))
                column.extend([float("nan")] * (place + 1 - len(column)))
                column[place] = value
        self._seconds.extend([float("nan")] * (len(self._places) - len(self._seconds)))


def _ends(part: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the places of the least and the greatest value among `part`, in its order."""
    return part[sorted({int(values[part].argmin()), int(values[part].argmax())})]
