"""The logs of all processes and stages of a job, in the order of time.

Each process writes JSON lines (trinity.runtime.logs) to <job>/[<stage>/]log/<process>.log; .log.1 to .log.3 are older.
Files are read backwards, only as far as the requested lines need. A line that is no JSON stays behind the line before
it. nats-server writes text without levels, and is shown on request only.

A run without a folder here has its lines on NATS (trinity.runtime.log_stream). They are read by sequence, without a
consumer: that changes nothing on NATS, and the role of a reader may do it. A process names itself in each line; the
subject, which NATS checks, has its service and the owner of the name.
"""

import contextlib
import dataclasses
import heapq
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from trinity.reading.errors import RunError
from trinity.reading.tail import GrowingFile
from trinity.runtime.broker import Broker, StoredMessage
from trinity.runtime.errors import NotFound
from trinity.runtime.names import RunNames, owner_of
from trinity.study.log_entry import NATS, Entry, Wanted, parse

_BLOCK = 256  # messages; each has the lines of half a second
_LOG_FILE = re.compile(r"(.+)\.log(?:\.\d+)?")


class ProcessLog:
    """The log of one process of one stage."""

    def __init__(self, process: str, path: Path) -> None:
        self.process = process
        self._file = GrowingFile(path)
        self._time = 0.0

    def last(self, lines: int, wanted: Wanted) -> list[Entry]:
        """Returns the last `lines` entries (0: all) of at least the wanted rank and time, in the order of the file."""
        found: list[Entry] = []
        for line in self._file.backwards():
            entry = parse(line, self.process)
            if entry.time is not None and entry.time < wanted.since:
                while found and found[-1].time is None:  # lines that follow it
                    found.pop()
                break
            if entry.rank >= wanted.least:
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
        """Gives an entry without a time that of the entry before it."""
        if entry.time is None:
            return dataclasses.replace(entry, time=self._time)
        self._time = entry.time
        return entry

    def _modified(self) -> float:
        with contextlib.suppress(OSError):
            return self._file.path.stat().st_mtime
        return 0.0


class JobLogs:
    """The selected logs of a job. `poll` finds new ones."""

    def __init__(self, folder: Path, service: str) -> None:
        self._folder, self._service = folder, service
        self.by_path: dict[Path, ProcessLog] = {}

    def poll(self) -> list[ProcessLog]:
        """Returns new sources."""
        wanted = {
            path: process
            for path, process in find(self._folder).items()
            if (process == self._service if self._service else process != NATS)
        }
        new = {path: ProcessLog(process, path) for path, process in wanted.items() if path not in self.by_path}
        self.by_path |= new
        return list(new.values())

    @property
    def width(self) -> int:
        """Length of the longest process name."""
        return max((len(source.process) for source in self.by_path.values()), default=0)


def find(folder: Path) -> dict[Path, str]:
    """Returns the log files of a job (the newest of each rotation) and their processes; nats-server last, by time of
    change.
    """
    found: dict[Path, str] = {}
    texts: list[Path] = []
    for place in (folder / "log", *sorted(folder.glob("*/log"))):
        for path in sorted(place.glob("*")):
            match = _LOG_FILE.fullmatch(path.name)
            if path.name in ("nats.log", "nats.out"):
                texts.append(path)
            elif match:
                found[place / f"{match[1]}.log"] = match[1]
    return found | dict.fromkeys(sorted(texts, key=lambda path: path.stat().st_mtime), NATS)


def history(sources: list[ProcessLog], lines: int, wanted: Wanted) -> Iterable[Entry]:
    if lines == 0 and not wanted.since:
        return heapq.merge(*(source.all(wanted.least) for source in sources), key=Entry.order)
    found = sorted((entry for source in sources for entry in source.last(lines, wanted)), key=Entry.order)
    return found[-lines:]


class RunLines:
    """The selected lines of one run on NATS. `open` reads the existing ones, `new` the later ones."""

    def __init__(self, broker: Broker, run: str, wanted: Wanted) -> None:
        self._broker, self._wanted = broker, wanted
        self._stream = RunNames(run).lines_stream
        self._next = 1

    async def open(self, lines: int) -> list[Entry]:
        """Returns the last `lines` entries (0: all) in the order of time.

        Raises RunError if NATS has no lines of the run.
        """
        try:
            state = await self._broker.state(self._stream)
        except NotFound:
            raise RunError(f"NATS has no log of the run: no stream {self._stream}") from None
        self._next = end = state.last_sequence + 1
        found: list[Entry] = []
        while end > state.first_sequence and not 0 < lines <= len(found):
            begin = max(state.first_sequence, end - _BLOCK)
            block = [entry for message in await self._read(begin, end) for entry in _entries(message)]
            found = [*filter(self._wanted.has, block), *found]
            if block and max(entry.time or 0.0 for entry in block) < self._wanted.since:
                break
            end = begin
        return sorted(found, key=Entry.order)[-lines:]

    async def new(self) -> list[Entry]:
        """Returns the lines stored since the last call, in the order of time."""
        messages = await self._read(self._next, self._next + _BLOCK)
        if messages:
            self._next = messages[-1].sequence + 1
        entries = [entry for message in messages for entry in _entries(message)]
        return sorted(filter(self._wanted.has, entries), key=Entry.order)

    async def _read(self, begin: int, end: int) -> list[StoredMessage]:
        """Returns the messages from `begin` to before `end` that still exist."""
        found: list[StoredMessage] = []
        while begin < end:
            part = await self._broker.several(self._stream, begin, end - begin)
            found += (message for message in part if message.sequence < end)
            if not part:
                break
            begin = part[-1].sequence + 1
        return found


def _entries(message: StoredMessage) -> Iterator[Entry]:
    service, owner = message.subject.split(".")[3:5]
    for line in message.data.split(b"\n"):
        entry = parse(line, service)
        name = entry.fields.get("process")
        if not isinstance(name, str) or owner_of(name) != owner:
            name = f"{service}/{owner}"
        yield dataclasses.replace(entry, process=name, service=service)
