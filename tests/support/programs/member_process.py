"""The real explorer as a process, with only its engine replaced (member_engine.py). It starts in a tenth of a second.

Processes are forked by a server that has imported everything once (forked.py).
"""

import importlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.programs.forked import fork, write_to
from support.programs.frozen import freeze, thaw
from trinity.runtime.process import free_port

ENGINE = "support.fakes.explorers.member_engine:MemberEngine"


def serve(settings: dict[str, Any], environment: dict[str, str], folder: Path, engine: str) -> None:
    """Main function of the process. `engine` is module:class."""
    from support.fakes.explorers.member_engine import Marks, MemberEngine
    from trinity.explorer.service import ExplorerService
    from trinity.explorer.settings import ExplorerSettings
    from trinity.explorer.weights import loader
    from trinity.runtime import host

    os.environ.update(environment)
    write_to(folder / "explorer.out")
    marks = MemberEngine.marks = Marks(folder / "marks.jsonl")
    module, _, name = engine.partition(":")
    getattr(importlib.import_module(module), name).take_over()
    fetch = loader.fetch

    def noted(cache: Any, manifest: Any, base_model: str) -> Any:
        marks.note("fetching", version=manifest.version)
        return fetch(cache, manifest, base_model)

    loader.fetch = noted
    chosen = ExplorerSettings(**settings, stop_with_parent=True)
    host.main(ExplorerService(chosen), chosen)


class MemberProcess:
    """start -> kill (-9), stop (SIGTERM), hold and go_on (SIGSTOP, SIGCONT). `folder` keeps its log and its marks."""

    def __init__(
        self, name: str, folder: Path, environment: dict[str, str], engine: str = ENGINE, **settings: Any
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self.folder = name, folder
        self.address = f"127.0.0.1:{free_port()}"
        self.marks = folder / "marks.jsonl"
        self._settings = {"name": name, "listen": self.address, "device": "cpu", **settings}
        self._environment, self._engine = environment, engine
        self._process: Any = None

    def start(self) -> "MemberProcess":
        self.marks.unlink(missing_ok=True)
        given = self._settings, self._environment, self.folder, self._engine
        self._process = fork(serve, given)
        return self

    @property
    def lives(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def noted(self) -> list[dict[str, Any]]:
        """Its marks since its start."""
        lines = self.marks.read_text().splitlines() if self.marks.exists() else []
        return [json.loads(line) for line in lines]

    def until_noted(self, holds: Callable[[dict[str, Any]], bool], since: int, seconds: float = 20.0) -> None:
        """Wait until a mark matches. Marks in `since` do not count."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(holds(mark) for mark in self.noted[since:]):
                return
            time.sleep(0.002)
        raise AssertionError(f"{self.name}: not within {seconds:g} s; it was seen {self.noted[since:][-5:]}")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        return self._end(signal.SIGTERM)

    def hold(self) -> None:
        freeze(self._process.pid)

    def go_on(self) -> None:
        thaw(self._process.pid)

    def _end(self, signum: signal.Signals) -> int:
        if self._process is None:
            return 0
        if self.lives:
            os.kill(self._process.pid, signum)
        self._process.join(20)
        code = self._process.exitcode
        if code is None:
            os.kill(self._process.pid, signal.SIGKILL)
            raise AssertionError(f"{self.name} did not end within 20 s of {signum.name}: {self.tail()}")
        self._process = None
        return int(code)

    def tail(self) -> str:
        path = self.folder / "explorer.out"
        return "\n".join(path.read_text(errors="replace").splitlines()[-8:]) if path.exists() else ""
