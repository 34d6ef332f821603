"""Processes of tests that begin with everything imported: torch, DeepSpeed and transformers alone take many seconds.

A server that has imported them once, and has done nothing else, forks each process. They are real processes, with
an environment of their own, and end, or are killed, as others are.
"""

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")

_PRELOADED = [
    "__main__",
    "support.member_engine",
    "support.releases",
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
]
_OF_THE_SERVER = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # both are read by imports


def fork(target: Callable[..., None], arguments: Sequence[Any]) -> Any:
    """A started process of multiprocessing that runs the function. It ends with this one."""
    _prepare()
    process = _context.Process(target=target, args=tuple(arguments), daemon=True)
    process.start()
    return process


class ForkedModule:
    """`python -m module` with these arguments and this environment; `output` is appended to. Used as a Popen is."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        self._process = fork(_run_module, (module, list(arguments), dict(environment), output))
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative if a signal ended it; None as long as it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit code. Raises TimeoutError."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise TimeoutError(f"process {self.pid} has not ended within {timeout:g} s")
        return code

    def send_signal(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_module(module: str, arguments: list[str], environment: dict[str, str], output: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    write_to(output)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def write_to(output: Path) -> None:
    """What this process prints, and its children, is appended to the file."""
    out = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)


def _prepare() -> None:
    """The server imports before it serves; Python 3.11 does not tell it where to look."""
    if forkserver._forkserver._forkserver_pid is not None:  # type: ignore[attr-defined]
        return
    given = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **_OF_THE_SERVER}
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
