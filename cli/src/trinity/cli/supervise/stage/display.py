"""Progress on the screen: a live table on a terminal, else one plain line per change; and the pages of a run."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from trinity.config import Config
from trinity.reading.client import Answers
from trinity.reading.render import visible
from trinity.reading.wire import failing, prompts_cut
from trinity.runtime.process import tied
from trinity.weights import ExplorerState

_STOP_SECONDS = 5.0


class Display(Protocol):
    def __enter__(self) -> "Display": ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, view: Answers, title: str) -> None:
        """Shows the present state; called about once a second."""

    def say(self, text: str) -> None:
        """Prints a line that stays on the screen."""


def make_display() -> Display:
    return LiveDisplay() if sys.stdout.isatty() else PlainDisplay()


def facts(view: Answers) -> dict[str, str]:
    """Returns the values whose change prints a line, by name."""
    shown: dict[str, str] = {}
    trainer, buffer = view.trainer, view.buffer
    if trainer is not None:
        shown["step"] = f"{trainer.step}/{trainer.last_step or '?'}"
        shown["trainer"] = trainer.state
        if trainer.waiting_for:
            shown["waits_for"] = trainer.waiting_for
    if buffer is not None and buffer.groups_per_step and buffer.fed:
        shown["reward"] = f"{buffer.reward_mean:.3f}"
        shown["staleness"] = f"{buffer.staleness_max}/{buffer.max_staleness_steps}"
        if failures := failing(buffer):
            shown["failing"] = failures
        if cut := prompts_cut(buffer):
            shown["prompts_cut"] = cut
        shown["groups"] = f"{buffer.stored} stored, {buffer.outstanding} out, {buffer.dead_letters} dead"
        shown["groups"] += f", {buffer.cut_tasks} cut" if buffer.cut_tasks else ""
    if buffer is not None and buffer.evaluations_outstanding:
        shown["evaluating"] = f"{buffer.evaluations_outstanding} tasks left"
    if buffer is not None and buffer.evaluations:
        newest = buffer.evaluations[-1]
        key = next((k for k in sorted(newest.metrics) if k.startswith("accuracy/")), "")
        if key:
            shown["eval"] = f"{newest.metrics[key]:.3f} at step {newest.step}"
            answered = newest.metrics.get(key.replace("accuracy/", "answered/"), 1.0)
            shown["eval"] += f", {1 - answered:.0%} without an answer" if answered < 1 else ""
    if view.members:
        versions = ",".join(str(member.version) for member in view.members)
        shown["explorers"] = f"{len(view.members)} (version {versions})"
        shown["tokens_per_s"] = f"{view.tokens_per_second:.0f}"
    if waiting := [one.explorer_id for one in view.members if one.state == ExplorerState.WAITING_FOR_PROVIDER]:
        shown["provider_away"] = f"tasks of {visible(', '.join(waiting))} wait for it; `trinity env list` names it"
    return shown


class LiveDisplay:
    """A table that is redrawn in place."""

    def __init__(self) -> None:
        self._console = Console(markup=False, emoji=False)  # an error's text may look like either
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, view: Answers, title: str) -> None:
        table = Table(title=title, show_header=False, title_justify="left")
        for name, value in facts(view).items():
            table.add_row(name.replace("_", " "), value)
        self._live.update(table)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)


class PlainDisplay:
    """Lines for logs and pipes: for each step, each other change, and a heartbeat every minute."""

    def __init__(self) -> None:
        self._seen: tuple[object, ...] = ()
        self._at = 0.0

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, view: Answers, title: str) -> None:
        shown = facts(view)
        if not shown:
            return
        values = (shown.get(name, "") for name in ("step", "eval", "explorers"))
        key = (*values, *(name in shown for name in ("failing", "prompts_cut", "provider_away")))
        now = time.monotonic()
        if (key != self._seen and now - self._at >= 2) or now - self._at > 60:
            self._seen, self._at = key, now
            self.say(f"{title}: " + " ".join(f"{name}={value!r}" for name, value in shown.items()))

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk, which may have the file that this goes to
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


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
        again = f"trinity ui --job {self._folder}"
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
