"""Child processes. Each leads a process group, is restarted with back-off and ends with its group."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from trinity.reading.job import ProcessRecord
from trinity.reading.render import clipped, visible
from trinity.runtime import files, waits
from trinity.runtime.errors import EXIT_AGAIN, EXIT_FOR_GOOD, EXIT_UNEXPECTED
from trinity.runtime.process import as_parent, inherited, is_suspended
from trinity.runtime.spares import Spare

log = structlog.get_logger(__name__)

MAX_RESTARTS = 5
_HEALTHY_SECONDS = 60.0
_LOOK_SECONDS = 5.0
_PRINTED = 0.25  # of log_mib
_BACKOFF_SECONDS = (0.5, 15.0)
_FOLLOW_SECONDS = 1.0
_LONGEST_REASON = 90  # characters on the screen
# What differs between two occurrences of the same error: addresses, hexadecimals, paths, numbers.
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\b(?=[a-fA-F]*\d)[0-9a-fA-F]{6,}\b|[\w.~-]*(?:/[\w.@+~-]+)+/?|\d+(?:[.:]\d+)*")


@dataclass
class Child:
    """A supervised process. A `once` child has finite work and writes `announce_file` when it is done.

    A child is not restarted after EXIT_FOR_GOOD, nor after EXIT_UNEXPECTED twice for the same reason. EXIT_AGAIN counts
    as no death. `hold(name, reason)` waits while something outside keeps the process from running; it returns True if
    the death does not count. `say` gets a line for the screen at each death, restart and wait; `continues` tells what
    the run does meanwhile. A child that a signal has stopped is killed after `stopped_seconds`, unless that is 0. A
    child that `keeps_spare` is replaced by a spare, once it has served. A child that `logs_ready` serves once its log
    says so, one with `prints_ready` once it has printed that text; before that each death is a quick one, however long
    it loaded.
    """

    name: str
    service: str
    command: Sequence[str]
    environment: Mapping[str, str]
    address: str
    log_file: Path
    metrics: str = ""
    gpus: Sequence[str] = ()
    once: bool = False
    log_mib: int = 400
    restarts: int = 0
    finished: bool = False
    logs_ready: bool = False
    prints_ready: str = ""
    stopped_seconds: float = 0.0
    keeps_spare: bool = False
    on_event: Callable[[str, str, int, str], None] = lambda event, name, pid, reason: None  # started, died, finished
    hold: Callable[[str, str], Awaitable[bool]] | None = None
    say: Callable[[str], None] = lambda text: None
    continues: Callable[[], str] = lambda: ""
    process: "subprocess.Popen[bytes] | None" = None
    phase: str = ""  # what it does until it serves
    waits: str = ""  # whom it waits for, and why
    _served_at: float | None = None
    _read: int = 0  # bytes of its log
    _quick_deaths: int = 0
    _died_of: str = ""
    _started_at: float = field(default=0.0)
    _begins: dict[Path, int] = field(default_factory=dict)
    _spare: Spare | None = None

    def start(self) -> None:
        """Starts the process. Call it from the main thread: the child ends with the thread that made it."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self.announce_file.unlink(missing_ok=True)
        self._begins = {path: path.stat().st_size for path in (self.log_file, self.output) if path.exists()}
        spare, self._spare = self._spare, None
        self.process = spare.begin(self._full_environment()) if spare is not None else None
        if self.process is None:
            with self.output.open("ab") as out:
                self.process = subprocess.Popen(
                    list(self.command),
                    env=self._full_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        self._started_at = time.monotonic()
        self._served_at = None if self.logs_ready or self.prints_ready else self._started_at
        self.phase, self.waits, self._read = "starts", "", self._begins.get(self.log_file, 0)
        log.info("run.process.started", name=self.name, pid=self.process.pid)
        self.on_event("started", self.name, self.pid, "")

    def _full_environment(self) -> dict[str, str]:
        limits = {f"TRINITY_{self.service.upper()}_LOG_MIB": str(self.log_mib)} if self.logs_ready else {}
        return {**inherited(), **limits, **self.environment, **as_parent()}

    def _keep_spare(self) -> None:
        with self.output.open("ab") as out:
            how = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
            self._spare = Spare(self.command, self._full_environment(), **how)

    def drop_spare(self) -> None:
        if self._spare is not None:
            self._spare.end()
            self._spare = None

    @property
    def output(self) -> Path:
        """File with everything that the process prints."""
        return self.log_file.with_suffix(".out")

    @property
    def announce_file(self) -> Path:
        """File in which a `once` process announces the end of its work: {"pid": ..., "finished": true}."""
        return self.log_file.with_suffix(".announced.json")

    def has_finished(self) -> bool:
        """Returns True if the last started process announced its end. Its exit code may differ."""
        said = files.read_json(self.announce_file)
        return isinstance(said, dict) and said.get("pid") == self.pid and said.get("finished") is True

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    def record(self) -> ProcessRecord:
        return ProcessRecord(
            name=self.name,
            service=self.service,
            pid=self.pid,
            address=self.address,
            metrics=self.metrics,
            restarts=self.restarts,
            log=str(self.log_file),
            gpus=list(self.gpus),
        )

    async def keep_running(self, changed: "asyncio.Event") -> str:
        """Restarts the process whenever it dies. Returns "finished" for a finished `once` child, else the reason."""
        while True:
            code = await self._wait()
            self.end_group(signal.SIGKILL)  # what a killed process left behind
            if self.once and self.has_finished():
                self.finished = True
                self.drop_spare()
                self.on_event("finished", self.name, self.pid, "")
                if code != 0:  # not what it should be, but there is nothing left to do for another process
                    log.error(
                        "run.process.finished_with_error",
                        name=self.name, pid=self.pid, how=_describe(code), reason=self.last_error(),
                    )  # fmt: skip
                return "finished"
            self._follow()
            served = time.monotonic() - self._served_at if self._served_at is not None else 0.0
            self._quick_deaths = 1 if served > _HEALTHY_SECONDS else self._quick_deaths + 1
            reason = self.death(code)
            self.on_event("died", self.name, self.pid, reason)
            log.warning("run.process.died", name=self.name, pid=self.pid, how=_describe(code), reason=reason)
            if self.hold is not None and await self.hold(self.name, reason if code > 0 else _describe(code)):
                self._quick_deaths -= 1
                self._start_again(changed)
                continue
            if code == EXIT_AGAIN:
                self._quick_deaths -= 1
                self.say(f"{self.name}: {visible(clipped(reason, _LONGEST_REASON * 2))}")
                self._start_again(changed)
                continue
            if code == EXIT_FOR_GOOD:
                return f"{self.name} cannot continue: {reason}"
            if code == EXIT_UNEXPECTED and _kind(reason) == _kind(self._died_of):
                return f"{self.name} ended twice in a row by the same error: {reason}"
            self._died_of = reason
            if self._quick_deaths > MAX_RESTARTS:
                return f"{self.name} died {self._quick_deaths} times in a row; its last error: {reason}"
            pause = min(_BACKOFF_SECONDS[0] * 2 ** (self._quick_deaths - 1), _BACKOFF_SECONDS[1])
            self.say(self._obituary(reason, pause))
            await asyncio.sleep(pause)
            self._start_again(changed)

    def _start_again(self, changed: "asyncio.Event") -> None:
        self.restarts += 1
        self.start()
        changed.set()

    def _obituary(self, reason: str, pause: float) -> str:
        then = self.continues()
        return (
            f"{self.name} died: {visible(clipped(reason, _LONGEST_REASON))}; restart {self._quick_deaths} of "
            f"{MAX_RESTARTS} in {pause:g} s{f'; {then}' if then else ''}"
        )

    async def _wait(self) -> int:
        assert self.process is not None
        follow_at = 0.0
        looked_at = moved_at = time.monotonic()
        while (code := self.process.poll()) is None:
            if (self.logs_ready or self.prints_ready) and time.monotonic() > follow_at:
                self._follow()
                follow_at = time.monotonic() + _FOLLOW_SECONDS
            await asyncio.sleep(0.05)
            if time.monotonic() - looked_at > _LOOK_SECONDS:
                looked_at = time.monotonic()
                moved_at = moved_at if is_suspended(self.pid) else looked_at
                if 0 < self.stopped_seconds < looked_at - moved_at:
                    log.error("run.process.hangs", name=self.name, pid=self.pid)
                    self.end_group(signal.SIGKILL)
                await asyncio.to_thread(self._cut_output)
        return code

    @property
    def start_seconds(self) -> float:
        """Seconds since the start of a process that does not serve yet; 0 once it serves."""
        return time.monotonic() - self._started_at if self._served_at is None and self.is_running() else 0.0

    def _follow(self) -> None:
        """Reads the new lines of the log: what the process does while it starts, and whom it waits for."""
        if self.prints_ready and self._served_at is None and self.has_printed(self.prints_ready):
            self._serves()
        for entry in files.json_lines(self._new_lines()):
            match entry.get("event"):
                case "service.ready":
                    self._serves()
                case waits.PHASE:
                    self.phase = str(entry.get("phase"))
                case waits.WAITS:
                    whom, why = str(entry.get("whom")), str(entry.get("reason") or "")
                    self.waits = visible(waits.text_of(whom, why, entry.get("limit_seconds")))
                    self.say(f"{self.name} {self.waits}")
                case waits.WENT_ON:
                    self.waits = ""

    def _serves(self) -> None:
        self._served_at = time.monotonic()
        if self.restarts:
            self.say(f"{self.name} serves again, {self._served_at - self._started_at:.0f} s after its start")
        if self.keeps_spare and self._spare is None:
            self._keep_spare()

    def _new_lines(self) -> list[str]:
        """Returns the whole lines that the log has got since the last call."""
        try:
            with self.log_file.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._read:  # the log was rotated
                    self._read = 0
                file.seek(self._read)
                whole, line_end, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._read += len(whole) + len(line_end)
        return whole.decode(errors="replace").splitlines()

    def _cut_output(self) -> None:
        """Empties the file of what the process prints once it is too long; its content stays in `<output>.1`.

        The process appends to the same file, so what it prints in the moment between both is lost.
        """
        with contextlib.suppress(OSError):
            if self.output.stat().st_size > self.log_mib * 2**20 * _PRINTED / 2:
                shutil.copyfile(self.output, self.output.with_name(f"{self.output.name}.1"))
                os.truncate(self.output, 0)

    def end_group(self, signum: int) -> None:
        """Sends a signal to the process and its descendants."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signum)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def death(self, code: int) -> str:
        """Returns why the process died: its last error, after the signal that killed it."""
        if code in (-signal.SIGKILL, -signal.SIGTERM):  # it did not see its end, so what it printed does not tell
            error = self._logged_error()
            return f"{_describe(code)}; its last error: {error}" if error else _describe(code)
        error = self.last_error()
        return f"{_describe(code)}; {error}" if error and code < 0 else error or _describe(code)

    def last_error(self) -> str:
        """Returns the reason in the newest error line of its log since the start, else the last printed line."""
        printed = [line for line in self._tail(self.output) if line.strip() and not line.startswith("time=")]
        return self._logged_error() or (printed[-1].strip()[:500] if printed else "")

    def _logged_error(self) -> str:
        for entry in files.json_lines(reversed(self._tail(self.log_file))):
            if entry.get("level") in ("error", "critical"):
                return str(entry.get("reason") or entry.get("event"))
        return ""

    def has_printed(self, text: str) -> bool:
        """Returns True if a line printed since the start contains the text."""
        return any(text in line for line in self._tail(self.output))

    def _tail(self, path: Path, size: int = 65536) -> list[str]:
        """Returns the last lines of a file, written since the last start."""
        try:
            with path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                begin = self._begins.get(path, 0)
                file.seek(max(begin if begin <= end else 0, end - size))
                return file.read().decode(errors="replace").splitlines()
        except OSError:
            return []


def _kind(reason: str) -> str:
    """Returns an error's text without what differs between two occurrences of the same error."""
    return _VARIABLE.sub("#", reason)


def _describe(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


async def stop_all(children: Sequence[Child], seconds: float, at_once: asyncio.Event | None = None) -> None:
    """Sends SIGTERM to all; after `seconds`, or once `at_once` is set, SIGKILL to the rest of their groups."""
    for child in children:
        if child.is_running() and child.process is not None:
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
    deadline = time.monotonic() + seconds
    while any(child.is_running() for child in children) and time.monotonic() < deadline:
        if at_once is not None and at_once.is_set():
            break
        await asyncio.sleep(0.05)
    for child in children:
        child.end_group(signal.SIGKILL)
        child.drop_spare()
    for child in children:
        if child.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=2)
