"""`trinity log`: the logs of all processes and stages of a job, in the order of time.

Each process writes JSON lines (trinity.runtime.logs) to <job>/[<stage>/]log/<process>.log; .log.1 to .log.3 are older.
Files are read from their end, no further than the lines asked for need. A line that is no JSON stays behind the one
it follows. nats-server writes text, without our levels: it is shown only when asked for. The lines of a run that is
known by its NATS come from there (log_lines.py).
"""

import asyncio
import contextlib
import dataclasses
import heapq
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from trinity.cli.commands.find import RunOnNats, find_log
from trinity.cli.commands.log_entry import NATS, Entry, Printer, Wanted, parse
from trinity.cli.commands.log_lines import RunLines
from trinity.cli.errors import RunError
from trinity.cli.options import command, group
from trinity.cli.supervise.nats import NatsAccess
from trinity.cli.tail import GrowingFile

app = group()

_POLL_SECONDS = 0.3
_LINES = 50
_CONNECT_SECONDS = 10.0
_LOG_FILE = re.compile(r"(.+)\.log(?:\.\d+)?")


class Source:
    """The log of one process of one stage."""

    def __init__(self, process: str, path: Path) -> None:
        self.process = process
        self._file = GrowingFile(path)
        self._time = 0.0

    def last(self, lines: int, wanted: Wanted) -> list[Entry]:
        """The last `lines` entries, 0: all, of at least this rank and not before its moment, in the file's order."""
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
            if (process == self._service if self._service else process != NATS)
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
    return found | dict.fromkeys(sorted(texts, key=lambda path: path.stat().st_mtime), NATS)


@command(app, "log", find_log)
def show(
    place: Path | RunOnNats,
    service: Annotated[str, typer.Argument(help="One process, as explorer; empty: all of them")] = "",
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="Lines to begin with, 50 without --since; 0: all")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue as lines are written")] = False,
    level: Annotated[str, typer.Option("--level", help="Least level: debug, info, warning, error")] = "info",
    since: Annotated[str, typer.Option("--since", help="Lines of this age or younger, as 90s, 10m, 2h, 1d")] = "",
    named: Annotated[str, typer.Option("--service", help="The same as the argument")] = "",
) -> int:
    """Show the log of a run, all processes in the order of time."""
    if service and named:
        raise RunError(f"--service {named}: {service!r} is given already", code=2)
    wanted = Wanted.of(level, service or named, since)
    lines = (0 if since else _LINES) if lines is None else lines
    try:
        if isinstance(place, Path):
            _show_files(place, wanted, lines, follow)
        else:
            asyncio.run(_show_run(place, wanted, lines, follow))
    except KeyboardInterrupt:
        if not follow:
            raise
    return 0


def _show_files(folder: Path, wanted: Wanted, lines: int, follow: bool) -> None:
    sources, least = Sources(folder, wanted.service), wanted.least
    if not sources.poll():
        raise _no_log(folder, wanted.service)
    printer = Printer()
    printer.write(_history(list(sources.by_path.values()), lines, wanted), sources.width)
    while follow:
        time.sleep(_POLL_SECONDS)
        before = list(sources.by_path.values())
        entries = [entry for source in sources.poll() for entry in source.all(least)]
        entries += [entry for source in before for entry in source.new(least)]
        printer.write(sorted(entries, key=Entry.order), sources.width)


async def _show_run(place: RunOnNats, wanted: Wanted, lines: int, follow: bool) -> None:
    printer, width = Printer(), 0
    async with await NatsAccess(place.nats_url).connect("trinity-log", "", wait_seconds=_CONNECT_SECONDS) as broker:
        run = RunLines(broker, place.run, wanted)
        entries = await run.open(lines)
        while True:
            width = max([width, *(len(entry.process) for entry in entries)])
            printer.write(entries, width)
            if not follow:
                return
            await asyncio.sleep(_POLL_SECONDS)
            entries = await run.new()


def _history(sources: list[Source], lines: int, wanted: Wanted) -> Iterable[Entry]:
    if lines == 0 and not wanted.since:
        return heapq.merge(*(source.all(wanted.least) for source in sources), key=Entry.order)
    found = sorted((entry for source in sources for entry in source.last(lines, wanted)), key=Entry.order)
    return found[-lines:]


def _no_log(folder: Path, service: str) -> RunError:
    names = sorted(set(find(folder).values()))
    printed = [
        str(path) for path in (folder / "log", *folder.glob("*/log")) for path in path.glob(f"{service or '*'}.out")
    ]
    hint = f"; what was printed is in {', '.join(sorted(printed))}" if printed else ""
    if service and names:
        return RunError(f"no log of {service!r} in {folder}; there are {', '.join(names)}{hint}", code=2)
    return RunError(f"no log in {folder}{hint}")
