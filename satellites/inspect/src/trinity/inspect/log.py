"""`trinity log`: the logs of all processes and stages of a job, in the order of time."""

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from trinity.commands import command, group
from trinity.reading.errors import RunError
from trinity.reading.find import RunOnNats, find_log
from trinity.reading.nats import NatsAccess
from trinity.reading.render import visible
from trinity.study.log import JobLogs, RunLines, find, history
from trinity.study.log_entry import Entry, Wanted

app = group()

_POLL_SECONDS = 0.3
_LINES = 50
_CONNECT_SECONDS = 10.0


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
    sources, least = JobLogs(folder, wanted.service), wanted.least
    if not sources.poll():
        raise _no_log(folder, wanted.service)
    printer = Printer()
    printer.write(history(list(sources.by_path.values()), lines, wanted), sources.width)
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


def _no_log(folder: Path, service: str) -> RunError:
    names = sorted(set(find(folder).values()))
    printed = [
        str(path) for path in (folder / "log", *folder.glob("*/log")) for path in path.glob(f"{service or '*'}.out")
    ]
    hint = f"; what was printed is in {', '.join(sorted(printed))}" if printed else ""
    if service and names:
        return RunError(f"no log of {service!r} in {folder}; there are {', '.join(names)}{hint}", code=2)
    return RunError(f"no log in {folder}{hint}")


_STYLES = {"debug": "dim", "info": "green", "warning": "yellow", "error": "red", "critical": "bold red"}


_NOT_FIELDS = {"time", "level", "event", "service", "logger", "trace_id", "process"}


_BARE = re.compile(r'[^\s"=]+')


class Printer:
    """Prints lines for people on standard output."""

    def __init__(self) -> None:
        console = Console(highlight=False)
        self._levels: dict[str, str] = {}
        for level, style in _STYLES.items():
            with console.capture() as capture:
                console.print(Text(f"{level:<8}", style), end="")
            self._levels[level] = capture.get()

    def write(self, entries: Iterable[Entry], width: int) -> None:
        """`width`: of the column of names."""
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
    """Returns an exception that structlog stored in Python's form; the last of `stacks` is the first cause.

    Locals are left out.
    """
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
