"""The newest lines of a monitor's file, <stage>/monitor/<role>.jsonl: a value of each metric for each step."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity.cli.tail import lines_backwards, whole_end

Line = dict[str, Any]


def read(folder: Path | None, role: str, steps: int) -> list[Line]:
    """At most so many steps, oldest first. Of a step that was trained again, the last line; empty without a file."""
    found: dict[int, Line] = {}
    for text in _backwards(folder, role):
        line = _parse(text)
        if line is not None:
            found.setdefault(line["step"], line)
        if len(found) >= steps:
            break
    return [found[step] for step in sorted(found)]


def at(folder: Path | None, role: str, step: int) -> Line:
    """The line of one step; empty if there is none."""
    begin = b'{"step": %d,' % step
    lines = (_parse(text) for text in _backwards(folder, role) if text.startswith(begin))
    return next(filter(None, lines), {})


def _backwards(folder: Path | None, role: str) -> Iterator[bytes]:
    if folder is None:
        return
    try:
        with (folder / "monitor" / f"{role}.jsonl").open("rb", buffering=0) as file:
            yield from lines_backwards(file, whole_end(file))
    except OSError:
        return


def _parse(text: bytes) -> Line | None:
    """None for a line that a crash cut off."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def values(lines: list[Line], name: str) -> list[float]:
    """A metric, where it was measured and finite."""
    found = (line.get(name) for line in lines)
    return [float(value) for value in found if isinstance(value, (int, float))]


def newest(lines: list[Line], name: str) -> float | None:
    found = values(lines[-1:], name)
    return found[0] if found else None
