"""`trinity log`: the logs of all processes and stages of a job, in the order of time.

Each process writes JSON lines (trinity.runtime.logs) to <job>/[<stage>/]log/<process>.log; .log.1 to .log.3 are older.
Files are read from their end, no further than the lines asked for need. A line that is no JSON stays behind the one
it follows. nats-server writes text, without our levels: it is shown only when asked for.
"""

import contextlib
import dataclasses
import heapq
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from trinity.cli.errors import RunError
from trinity.cli.tail import GrowingFile, visible

_POLL_SECONDS = 0.3
_NATS = "nats"
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_RANKS = {**_LEVELS, "warn": 30, "exception": 40, "critical": 50, "fatal": 50}
_STYLES = {"debug": "dim", "info": "green", "warning": "yellow", "error": "red", "critical": "bold red"}
_NOT_FIELDS = {"time", "level", "event", "service", "logger", "trace_id"}
_LOG_FILE = re.compile(r"(.+)\.log(?:\.\d+)?")
_BARE = re.compile(r'[^\s"=]+')


@dataclass(frozen=True)
class Entry:
    """One line of one process. `time`: seconds since 1970, None if the line has none. `fields`: empty for text."""

    process: str
    text: str
    time: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Rank of the level. Text has no level and always passes the filter."""
        return _RANKS.get(str(self.fields.get("level", "info")).lower(), _LEVELS["info"]) if self.fields else 100


def parse(line: bytes, process: str) -> Entry:
    """A line of a log file."""
    text = line.decode(errors="replace")
    try:
        fields = json.loads(text) if process != _NATS else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return Entry(process, text)
    try:
        moment = datetime.fromisoformat(fields["time"])
    except (KeyError, TypeError, ValueError):
        return Entry(process, text, None, fields)
    return Entry(process, text, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp(), fields)


class Source:
    """The log of one process of one stage."""

    def __init__(self, process: str, path: Path) -> None:
        self.process = process
        self._file = GrowingFile(path)
        self._time = 0.0

    def last(self, lines: int, least: int) -> list[Entry]:
        """The last `lines` entries of at least this rank, in the order of the file."""
        found: list[Entry] = []
        for line in self._file.backwards():
            entry = parse(line, self.process)
            if entry.rank >= least:
                found.append(entry)
                if len(found) == lines:
                    break
        found.reverse()
        known = (entry.time for entry in found if entry.time is not None)
        self._time = next(known, None) or self._modified()
        return [self._dated(entry) for entry in found]

    def all(self, least: int) -> Iterator[Entry]:
        return self._entries(self._file.forwards(), least)

    def new(self, least: int) -> Iterator[Entry]:
        return self._entries(self._file.new_lines(), least)

    def _entries(self, lines: Iterable[bytes], least: int) -> Iterator[Entry]:
        for line in lines:
            entry = self._dated(parse(line, self.process))
            if entry.rank >= least:
                yield entry

    def _dated(self, entry: Entry) -> Entry:
        """An entry without a time has that of the one before."""
        if entry.time is None:
            return dataclasses.replace(entry, time=self._time)
        self._time = entry.time
        return entry

    def _modified(self) -> float:
        with contextlib.suppress(OSError):
            return self._file.path.stat().st_mtime
        return 0.0


class Sources:
    """The logs of a job that were asked for. New ones are found by `poll`."""

    def __init__(self, folder: Path, service: str) -> None:
        self._folder, self._service = folder, service
        self.by_path: dict[Path, Source] = {}

    def poll(self) -> list[Source]:
        """Sources that were not there before."""
        wanted = {
            path: process
            for path, process in find(self._folder).items()
            if (process == self._service if self._service else process != _NATS)
        }
        new = {path: Source(process, path) for path, process in wanted.items() if path not in self.by_path}
        self.by_path |= new
        return list(new.values())

    @property
    def width(self) -> int:
        """Of the longest name of a process."""
        return max((len(source.process) for source in self.by_path.values()), default=0)


def find(folder: Path) -> dict[Path, str]:
    """Log files of a job (the newest of each rotation) and their processes; nats-server last, by time of change."""
    found: dict[Path, str] = {}
    texts: list[Path] = []
    for place in (folder / "log", *sorted(folder.glob("*/log"))):
        for path in sorted(place.glob("*")):
            match = _LOG_FILE.fullmatch(path.name)
            if path.name in ("nats.log", "nats.out"):
                texts.append(path)
            elif match:
                found[place / f"{match[1]}.log"] = match[1]
    return found | dict.fromkeys(sorted(texts, key=lambda path: path.stat().st_mtime), _NATS)


def show(folder: Path, service: str, lines: int, follow: bool, level: str) -> None:
    """Print the last `lines` lines (0: all) of a job's logs; with `follow`, continue until Ctrl-C.

    RunError for a level or a process there is not, or if there is no log at all.
    """
    if level.lower() not in _LEVELS:
        raise RunError(f"level {level!r} is none of {', '.join(_LEVELS)}", code=2)
    least, sources = _LEVELS[level.lower()], Sources(folder, service)
    if not sources.poll():
        raise _no_log(folder, service)
    printer = Printer()
    try:
        printer.write(_history(list(sources.by_path.values()), lines, least), sources.width)
        while follow:
            time.sleep(_POLL_SECONDS)
            before = list(sources.by_path.values())
            entries = [entry for source in sources.poll() for entry in source.all(least)]
            entries += [entry for source in before for entry in source.new(least)]
            printer.write(sorted(entries, key=_time), sources.width)
    except KeyboardInterrupt:
        if not follow:
            raise
    except BrokenPipeError:  # `| head` has enough
        with contextlib.suppress(OSError, ValueError):  # else Python complains when it flushes at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _history(sources: list[Source], lines: int, least: int) -> Iterable[Entry]:
    if lines == 0:
        return heapq.merge(*(source.all(least) for source in sources), key=_time)
    return sorted((entry for source in sources for entry in source.last(lines, least)), key=_time)[-lines:]


def _time(entry: Entry) -> float:
    return entry.time or 0.0


def _no_log(folder: Path, service: str) -> RunError:
    names = sorted(set(find(folder).values()))
    printed = [
        str(path) for path in (folder / "log", *folder.glob("*/log")) for path in path.glob(f"{service or '*'}.out")
    ]
    hint = f"; what was printed is in {', '.join(sorted(printed))}" if printed else ""
    if service and names:
        return RunError(f"no log of {service!r} in {folder}; there are {', '.join(names)}{hint}", code=2)
    return RunError(f"no log in {folder}{hint}")


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
            time.strftime("%H:%M:%S", time.localtime(_time(entry))),
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
