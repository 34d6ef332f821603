"""The newest lines of a monitor file, <stage>/monitor/<role>.jsonl: a value of each metric for each step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
