"""`trinity run` as a user starts it, in a separate process, watched through `trinity status --json`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import yaml

from trinity.reading.job import read_records
from trinity.reading.status import collect
from trinity.runtime import rpc
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import Role

Status = dict[str, Any]


class TrinityRun:
    """start -> until(...) -> finish or kill. `folder` keeps its output and its job."""

    def __init__(self, config: Path, folder: Path, **environment: str) -> None:
        self.config = config
        self.folder = folder
        values = yaml.safe_load(config.read_text())
        self.job = folder / "jobs" / values["project"] / values["name"]
        self.environment = {**os.environ, "TRINITY_CHECKPOINT_ROOT_DIR": str(folder / "jobs"), **environment}
        self.output = folder / f"{config.stem}.out"
        self.seen: dict[int, float] = {}  # pid -> when it was made, of every process that was ever seen
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *overrides: str) -> None:
        command = [sys.executable, "-m", "trinity.cli.main", "run", "--config", str(self.config), *overrides]
        with self.output.open("ab") as out:
            self._process = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def status(self) -> Status:
        """Output of `trinity status --json`."""
        command = [sys.executable, "-m", "trinity.cli.main", "status", "--config", str(self.config), "--json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, timeout=60, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def channel(self, address: str, role: Role = Role.OPERATOR) -> grpc.Channel:
        """To a service of the run, with the identity of a role."""
        return rpc.blocking_channel(address, identity=identity_of(self.job, role))

    def poll_status(self) -> Status | None:
        """The same, read in this process: a command per call would take a third of a core. None without a run."""
        self._remember()
        return asyncio.run(collect(self.job)) if read_records(self.job) else None

    def until(self, holds: Callable[[Status], Any], seconds: float, what: str) -> Status:
        """The first status for which it holds. Fails when the time is over or the run ended before."""
        deadline = time.monotonic() + seconds
        status: Status | None = None
        while time.monotonic() < deadline:
            status = self.poll_status()
            if status is not None and holds(status):
                return status
            if self._process is not None and self._process.poll() is not None:
                raise AssertionError(f"the run ended before {what}: {self.tail()}")
            time.sleep(0.25)
        raise AssertionError(f"not within {seconds:g} s: {what}; last seen {json.dumps(status)[:3000]}; {self.tail()}")

    def finish(self, seconds: float) -> int:
        """Exit code, once it ended by itself."""
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                return code
            self._remember()
            time.sleep(0.5)
        self.kill()
        raise AssertionError(f"the run did not end within {seconds:g} s: {self.tail()}")

    def signal(self, signum: signal.Signals) -> None:
        self._remember()
        assert self._process is not None
        self._process.send_signal(signum)

    def kill(self) -> None:
        """kill -9 of only `trinity run`."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGKILL)
            self._process.wait(timeout=10)

    def tail(self, lines: int = 25) -> str:
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def left_alive(self, within_seconds: float) -> list[str]:
        """Processes of the run that still live after the time, of all that were ever seen."""
        deadline = time.monotonic() + within_seconds
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive

    def end(self) -> None:
        """For fixtures: nothing of the run outlives the test."""
        self._remember()
        self.kill()
        for pid, made in self.seen.items():
            try:
                process = psutil.Process(pid)
                if process.create_time() == made:
                    process.kill()
            except psutil.Error:
                continue

    def _remember(self) -> None:
        if self._process is None:
            return
        try:
            root = psutil.Process(self._process.pid)
            for process in [root, *root.children(recursive=True)]:
                self.seen.setdefault(process.pid, process.create_time())
        except psutil.Error:
            return

    def _alive(self) -> list[str]:
        alive = []
        for pid, made in self.seen.items():
            try:
                process = psutil.Process(pid)
                if process.create_time() == made and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(f"{pid} {' '.join(process.cmdline())[:200]}")
            except psutil.Error:
                continue
        return alive


def identity_of(job: Path, role: Role = Role.OPERATOR) -> Identity:
    """The identity of the command line for a job folder. It has none for a folder without tokens."""
    return Identity(role, job / "identity")


def process_of(status: Status, name: str) -> dict[str, Any]:
    """One entry of `processes`."""
    return next(process for process in status["processes"] if process["name"] == name)


def kill_process(status: Status, name: str) -> int:
    """kill -9 of one service; returns its pid."""
    pid = int(process_of(status, name)["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def write_config(source: Path, target: Path, changes: dict[str, Any]) -> Path:
    """A YAML with some keys changed; `changes` is nested as the YAML is, lists by index."""
    values = yaml.safe_load(source.read_text())
    _merge(values, changes)
    target.write_text(yaml.safe_dump(values, sort_keys=False))
    return target


def _merge(values: Any, changes: dict[Any, Any]) -> None:
    for key, change in changes.items():
        if isinstance(change, dict) and (isinstance(values, list) or isinstance(values.get(key), (dict, list))):
            _merge(values[key], change)
        else:
            values[key] = change
