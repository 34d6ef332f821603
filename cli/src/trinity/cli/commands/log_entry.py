"""A line of a log: what its fields mean, whether it was asked for, and how it looks on a terminal."""

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.text import Text

from trinity.cli.errors import RunError
from trinity.cli.render import visible

NATS = "nats"
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_RANKS = {**_LEVELS, "warn": 30, "exception": 40, "critical": 50, "fatal": 50}
_STYLES = {"debug": "dim", "info": "green", "warning": "yellow", "error": "red", "critical": "bold red"}
_NOT_FIELDS = {"time", "level", "event", "service", "logger", "trace_id", "process"}
_BARE = re.compile(r'[^\s"=]+')
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_NATS_TIME = re.compile(r"\[\d+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6}) ")  # of this machine


@dataclass(frozen=True)
class Entry:
    """One line of one process. `time`: seconds since 1970, None if the line has none. `fields`: empty for text.

    `service`: of the process, where another than itself says so.
    """

    process: str
    text: str
    time: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    service: str = ""

    @property
    def rank(self) -> int:
        """Rank of the level. Text has no level and always passes the filter."""
        return _RANKS.get(str(self.fields.get("level", "info")).lower(), _LEVELS["info"]) if self.fields else 100

    def order(self) -> float:
        """Its place among others."""
        return self.time or 0.0


@dataclass(frozen=True)
class Wanted:
    """Which lines were asked for: of this service or process, of at least this rank, and from this moment on.

    `since`: seconds since 1970.
    """

    least: int = 0
    service: str = ""
    since: float = 0.0

    @classmethod
    def of(cls, level: str, service: str, age: str) -> "Wanted":
        """From a level's name, and an age such as 10m. RunError for what is neither."""
        if level.lower() not in _LEVELS:
            raise RunError(f"level {level!r} is none of {', '.join(_LEVELS)}", code=2)
        found = _AGE.fullmatch(age)
        if age and found is None:
            raise RunError(f"--since {age}: must be a number with s, m, h or d, as 10m", code=2)
        since = time.time() - float(found[1]) * _SECONDS[found[2]] if found else 0.0
        return cls(_LEVELS[level.lower()], service, since)

    def has(self, entry: Entry) -> bool:
        """Whether a line was asked for."""
        named = self.service in ("", entry.process, entry.service)
        return named and entry.rank >= self.least and entry.order() >= self.since


def parse(line: bytes, process: str) -> Entry:
    """A line of a log file."""
    text = line.decode(errors="replace")
    if process == NATS:
        return Entry(process, text, _nats_time(text))
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return Entry(process, text)
    try:
        moment = datetime.fromisoformat(fields["time"])
    except (KeyError, TypeError, ValueError):
        return Entry(process, text, None, fields)
    return Entry(process, text, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp(), fields)


def _nats_time(text: str) -> float | None:
    found = _NATS_TIME.match(text)
    with contextlib.suppress(ValueError, OverflowError):
        return datetime.strptime(found[1], "%Y/%m/%d %H:%M:%S.%f").timestamp() if found else None
    return None


class Printer:
    """Lines for people on standard output."""

    def __init__(self) -> None:
        console = Console(highlight=False)
        self._levels: dict[str, str] = {}
        for level, style in _STYLES.items():
            with console.capture() as capture:
                console.print(Text(f"{level:<8}", style), end="")
            self._levels[level] = capture.get()

    def write(self, entries: Iterable[Entry], width: int) -> None:
        """`width` is that of the column of names."""
        for entry in entries:
            sys.stdout.write(self._render(entry, width) + "\n")
        sys.stdout.flush()

    def _render(self, entry: Entry, width: int) -> str:
        if not entry.fields:
            return visible(entry.text, layout=True)
        level = str(entry.fields.get("level", "info")).lower()
        words = [
            time.strftime("%H:%M:%S", time.localtime(entry.order())),
            self._levels.get(level) or f"{visible(level):<8}",
            f"{visible(entry.process):<{width}}",
            visible(str(entry.fields.get("event", ""))),
        ]
        below: list[str] = []
        for key, value in entry.fields.items():
            if key == "exception" and isinstance(value, list):
                below += traceback_lines(value)
            elif key in ("exception", "stack") and isinstance(value, str):
                below += value.splitlines()
            elif key not in _NOT_FIELDS:
                words.append(f"{visible(key)}={_value(value)}")
        return "\n".join([" ".join(words), *(f"    {visible(line)}".rstrip() for line in below)])


def _value(value: Any) -> str:
    if isinstance(value, str) and _BARE.fullmatch(value):
        return visible(value)
    return visible(json.dumps(value, ensure_ascii=False))


def traceback_lines(stacks: list[Any]) -> list[str]:
    """An exception as structlog keeps it, in Python's form: the last of `stacks` is the first cause. Without locals."""
    lines: list[str] = []
    for position, stack in reversed(list(enumerate(stacks))):
        if not isinstance(stack, dict):
            lines.append(str(stack))
            continue
        lines += _stack_lines(stack)
        if position and stack.get("is_cause"):
            lines += ["", "The above exception was the direct cause of the following exception:", ""]
        elif position:
            lines += ["", "During handling of the above exception, another exception occurred:", ""]
    return lines


def _stack_lines(stack: dict[str, Any]) -> list[str]:
    frames = stack.get("frames") or []
    lines = ["Traceback (most recent call last):"] if frames else []
    for frame in frames:
        if frame.get("lineno") == -1:  # structlog's word for frames it left out
            lines.append(f"  {frame.get('filename')}")
        else:
            lines.append(f'  File "{frame.get("filename")}", line {frame.get("lineno")}, in {frame.get("name")}')
    if wrong := stack.get("syntax_error"):
        lines += [f'  File "{wrong.get("filename")}", line {wrong.get("lineno")}', f"    {wrong.get('line')}".rstrip()]
    head = f"{stack.get('exc_type')}: {stack.get('exc_value')}".removesuffix(": ")
    lines += [*head.splitlines(), *(str(note) for note in stack.get("exc_notes") or [])]
    for number, inner in enumerate(stack.get("exceptions") or [], 1):
        lines += [f"  + {number}", *(f"  | {line}" for line in traceback_lines(inner))]
    return lines
