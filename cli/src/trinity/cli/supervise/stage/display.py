"""Progress on the screen: a live table on a terminal, else one plain line per change; and the pages of a run."""

import asyncio
import contextlib
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rich.cells import cell_len, set_cell_size

from trinity.cli.supervise.stage.progress import TROUBLES, Pace, Starting, bar, facts
from trinity.config import Config
from trinity.reading.client import Answers
from trinity.reading.render import clipped, visible
from trinity.runtime.process import leave_terminal, tied

_STOP_SECONDS = 5.0
_BEAT, _START_BEAT = 60.0, 30.0  # seconds after which a plain line comes without news
_LONG_WAIT = 10.0
_LONGEST_LINE = 159  # characters of a plain line of progress


class Display(Protocol):
    def __enter__(self) -> "Display": ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, view: Answers, title: str, last_step: int = 0, starting: Sequence[Starting] = ()) -> None:
        """Shows the present state; called about once a second."""

    def say(self, text: str) -> None:
        """Prints a line that stays on the screen."""


def make_display() -> Display:
    return LiveDisplay() if sys.stdout.isatty() else PlainDisplay()


class _Stages:
    """The pace of the stage that is shown: another title begins another stage."""

    def __init__(self) -> None:
        self._title, self._pace = "", Pace()

    def of(self, title: str) -> Pace:
        if title != self._title:
            self._title, self._pace = title, Pace()
        return self._pace


class LiveDisplay:
    """A table that stays below the printed lines. Only lines that changed are written again."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._width = 0
        self._stages = _Stages()
        self._writing = threading.Lock()  # another thread may say a wait

    def __enter__(self) -> "LiveDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        with self._writing:
            self._write(self._erased())

    def show(self, view: Answers, title: str, last_step: int = 0, starting: Sequence[Starting] = ()) -> None:
        shown = facts(view, last_step, self._stages.of(title), starting)
        if (trainer := view.trainer) is not None and "step" in shown:
            shown["step"] = f"{bar(trainer.step, trainer.last_step or last_step)} {shown['step']}"
        width = max(map(cell_len, shown), default=0)
        rows = [f"  {name.replace('_', ' '):<{width}}  {value}" for name, value in shown.items()]
        with self._writing:
            self._redraw([visible(title), *rows] if rows else [])

    def say(self, text: str) -> None:
        with self._writing:
            lines, erased = self._lines, self._erased()
            self._write(f"{erased}{visible(text, layout=True)}\n")
            self._redraw(lines)

    def _redraw(self, lines: list[str]) -> None:
        size = shutil.get_terminal_size()
        # A line that wraps would move the others, and a table that scrolls cannot be reached again.
        lines = [_cut(line, size.columns - 1) for line in lines][: size.lines - 1]
        parts = []
        if len(lines) != len(self._lines) or size.columns != self._width:
            parts = [self._erased(), *(f"{line}\n" for line in lines)]
        else:
            for index, (new, old) in enumerate(zip(lines, self._lines, strict=True)):
                if new != old:
                    up = len(lines) - index
                    parts.append(f"\x1b[{up}A\r\x1b[2K{new}\x1b[{up}B\r")
        self._lines, self._width = lines, size.columns
        self._write("".join(parts))

    def _erased(self) -> str:
        """Returns what erases the table."""
        count, self._lines = len(self._lines), []
        return f"\x1b[{count}A\r\x1b[J" if count else ""

    def _write(self, text: str) -> None:
        if text:
            try:
                sys.stdout.write(text)
                sys.stdout.flush()
            except OSError:  # the terminal of a run that its shell disowned was closed
                leave_terminal()


def _cut(line: str, cells: int) -> str:
    return line if cell_len(line) <= cells else f"{set_cell_size(line, cells - 3).rstrip()}..."


class PlainDisplay:
    """Lines for logs and pipes: for each step, each other change, and a heartbeat every minute."""

    def __init__(self) -> None:
        self._seen: tuple[object, ...] = ()
        self._at = 0.0
        self._waits_since = time.monotonic()
        self._troubles: set[str] = set()
        self._stages = _Stages()

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, view: Answers, title: str, last_step: int = 0, starting: Sequence[Starting] = ()) -> None:
        shown = facts(view, last_step, self._stages.of(title), starting)
        troubles = {name: shown.pop(name) for name in TROUBLES if name in shown}
        for name in troubles.keys() - self._troubles:
            self.say(f"{title}: {name.replace('_', ' ')}: {troubles[name]}", clip=True)
        self._troubles = set(troubles)
        if not shown:
            return
        now = time.monotonic()
        if "waits for" not in shown:
            self._waits_since = now
        if now - self._waits_since < _LONG_WAIT:  # each step begins with a short one
            shown.pop("waits for", None)
        phases = tuple((one.name, one.phase) for one in starting)
        step = shown.get("step", "").partition(",")[0]
        key = (step, shown.get("accuracy", ""), shown.get("explorers", ""), phases, "waits for" in shown)
        if (key != self._seen and now - self._at >= 2) or now - self._at > (_START_BEAT if starting else _BEAT):
            self._seen, self._at = key, now
            self.say(f"{title}: " + ", ".join(f"{name} {value}" for name, value in shown.items()), clip=True)

    def say(self, text: str, clip: bool = False) -> None:
        line = visible(f"{time.strftime('%H:%M:%S')} {text}", layout=True)
        with contextlib.suppress(OSError):  # a full disk, which may have the file that this goes to
            print(clipped(" ".join(line.split()), _LONGEST_LINE) if clip else line, flush=True)


class Pages:
    """Runs `trinity ui` with a run, if monitor.ui is set and a terminal can show its address.

    `start` starts it once, `close` ends it. The run does not depend on it.
    """

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None]) -> None:
        self._wanted = config.monitor.ui and sys.stdout.isatty()
        self._folder, self._say = folder, say
        self._process: asyncio.subprocess.Process | None = None
        self._telling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the pages of a job folder in which a stage has begun."""
        if not self._wanted or self._process is not None:
            return
        command = tied([sys.executable, "-m", "trinity.cli.main", "ui", "--job", str(self._folder)])
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(*command, stdin=none, stdout=pipe, stderr=none)
        self._telling = asyncio.create_task(self._tell(self._process))

    async def _tell(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        if line := (await process.stdout.readline()).decode().strip():
            self._say(f"pages of the run: {line}")
            await process.wait()
        again = f"trinity ui --job {shlex.quote(str(self._folder))}"
        self._say(f"the pages of the run ended with exit code {await process.wait()}; `{again}` shows them, or why not")

    async def close(self) -> None:
        if self._process is None or self._telling is None:
            return
        self._telling.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
