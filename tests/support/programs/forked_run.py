"""`trinity` and the services it starts, forked with everything imported, and transformers where vLLM would be.

For tests of the trainer. Processes, protocols, files and supervision are those of `trinity run`. Only the explorer's
engine differs (torch_engine.py), and processes save the time of imports.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from support.fakes.explorers.torch_engine import TorchEngine
from support.programs.forked import Forked, run_module, server_address, use_server, write_to
from support.programs.run import TrinityRun
from support.servers.service import ServiceProcess
from trinity.reading.job import read_records
from trinity.runtime.process import is_alive


class ForkedRun(TrinityRun):
    """Like TrinityRun. The services are no children of the process that starts them, but end with it."""

    def __init__(self, config: Path, folder: Path, engine: type[TorchEngine] = TorchEngine, **environment: str) -> None:
        super().__init__(config, folder, **environment)
        self._engine = engine

    def start(self, *overrides: str) -> None:
        arguments = ["run", "--config", str(self.config), *overrides]
        given = arguments, self.environment, self.output, self.output, self._engine
        self._process = _fork_trinity(*given)  # type: ignore[assignment]

    def _remember(self) -> None:
        super()._remember()
        for record in read_records(self.job).values():
            for process in record.processes:
                if process.pid not in self.seen and psutil.pid_exists(process.pid):
                    self.seen[process.pid] = psutil.Process(process.pid).create_time()


class ForkedService(ServiceProcess):
    """Like ServiceProcess. An explorer samples with transformers."""

    def start(self, wait_seconds: float = 60.0) -> "ForkedService":
        given = f"trinity.{self.name}.main", ["serve"], self._environment, self.log_file.with_suffix(".out")
        self._process = Forked(_service, (*given, TorchEngine, os.getpid()))  # type: ignore[assignment]
        if wait_seconds:
            self.wait_serving(wait_seconds)
        return self


def trinity(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, seconds: float = 200
) -> "subprocess.CompletedProcess[str]":
    """A command to its end. `folder` keeps what it printed."""
    files = [folder / f"trinity-{time.monotonic_ns()}.{kind}" for kind in ("out", "err")]
    process = _fork_trinity(arguments, environment, files[0], files[1], TorchEngine)
    try:
        code = process.wait(timeout=seconds)
    finally:
        process.kill()
    out, err = (file.read_text(errors="replace") for file in files)
    return subprocess.CompletedProcess(list(arguments), code, out, err)


def _fork_trinity(
    arguments: Sequence[str], environment: Mapping[str, str], out: Path, err: Path, engine: type[TorchEngine]
) -> Forked:
    given = list(arguments), dict(environment), out, err, engine, server_address(), os.getpid()
    return Forked(_trinity, given)


def _trinity(
    arguments: list[str],
    environment: dict[str, str],
    out: Path,
    err: Path,
    engine: type[TorchEngine],
    server: str,
    test: int,
) -> None:
    """Main function in the process of the command."""
    from trinity.reading import children
    from trinity.runtime import process

    os.setsid()
    _end_with(test)
    os.environ.clear()
    os.environ.update(environment)
    write_to(out, 1)
    write_to(err, 2)
    use_server(server)

    def popen(command: list[str], **how: Any) -> Any:
        """Services of Python are forked; nats-server is a program."""
        if command[1] != "-m" or not command[2].endswith(".main"):
            return subprocess.Popen(command, **how)
        env = {**how["env"]}
        env.pop(process.PARENT, None)  # the parent is the server of forks; `_end_with` has the command's pid
        return Forked(_service, (command[2], command[3:], env, Path(how["stdout"].name), engine, os.getpid()))

    children.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen})  # type: ignore[assignment]
    from trinity.cli.main import app

    sys.argv = ["trinity", *arguments]
    app()


def _service(
    module: str, arguments: list[str], environment: dict[str, str], output: Path, engine: type[TorchEngine], run: int
) -> None:
    """Main function in the process of a service."""
    os.setsid()
    _end_with(run)
    engine.take_over()
    run_module(module, arguments, environment, output)


def _end_with(pid: int) -> None:
    """Kill this process soon after that one has ended. The kernel does so only for a parent."""

    def watch() -> None:
        while is_alive(pid):
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
