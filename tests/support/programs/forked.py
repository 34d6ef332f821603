"""Processes of tests that begin with all imports done: torch, DeepSpeed and transformers take many seconds.

A server that imports them once, and does nothing else, forks each process. They are real processes with their own
environment variables, and end or are killed like others.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from trinity.runtime.torch_builds import hide_unusable_companions

_context = multiprocessing.get_context("forkserver")

_PRELOADED = [
    "__main__",
    "support.programs.trainer.releases",
    "support.fakes.explorers.torch_engine",
    "trinity.explorer.service",
    "trinity.runtime.host",
    "trinity.weights.stores.s3",
    "trinity.trainer.build",
    "trinity.trainer.loop",
    "deepspeed",
    "peft",
    "transformers.models.auto.tokenization_auto",
    "transformers.modeling_utils",  # what the tokenizer imports when it is first used
    "transformers.models.qwen2.modeling_qwen2",
    "trinity.buffer.service",
    "trinity.cli.main",
    "trinity.lineage.replay_step",
    "trinity.cli.supervise.stage.supervisor",
    "trinity.environment.service",
    "trinity.sync.service",
    "trinity.trainer.service",
]
_OF_THE_SERVER = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # both are read by imports


def fork(target: Callable[..., None], arguments: Sequence[Any]) -> Any:
    """A started process of multiprocessing that runs the function. It ends with this one."""
    _prepare()
    process = _context.Process(target=target, args=tuple(arguments), daemon=True)
    process.start()
    return process


class Forked:
    """A function in a separate process, with the interface of Popen."""

    def __init__(self, target: Callable[..., None], arguments: Sequence[Any]) -> None:
        self._process = fork(target, arguments)
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative if a signal ended it; None as long as it runs."""
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkedModule(Forked):
    """`python -m module` with these arguments and this environment; `output` is appended to."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        super().__init__(run_module, (module, list(arguments), dict(environment), output))


def run_module(module: str, arguments: list[str], environment: dict[str, str], output: Path) -> None:
    """All that is left of this process."""
    os.environ.clear()
    os.environ.update(environment)
    write_to(output)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def write_to(output: Path, *descriptors: int) -> None:
    """Appends the output of this process and its children to the file; or their writes to the descriptors."""
    out = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor in descriptors or (1, 2):
        os.dup2(out, descriptor)
    os.close(out)


def server_address() -> str:
    """For `use_server`."""
    _prepare()
    return str(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]


def use_server(address: str) -> None:
    """Let a forked process fork processes by the same server, without importing everything again."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    server.ensure_running = lambda: None
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    sys.modules["__main__"] = types.ModuleType("__main__")  # theirs is not to be this one's


def _prepare() -> None:
    """The server imports before it serves; Python 3.11 does not tell it where to look."""
    if forkserver._forkserver._forkserver_address is not None:  # type: ignore[attr-defined]
        return
    hide_unusable_companions()
    paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    given = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)), **_OF_THE_SERVER}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    _context.set_forkserver_preload(_PRELOADED)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
