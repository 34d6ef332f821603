"""Asks the services what their start would refuse: `trinity-explorer check` and `trinity-trainer check`."""

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trinity.cli.supervise.processes import services
from trinity.cli.supervise.processes.devices import place
from trinity.config import Plan, Problem, dump
from trinity.config.run_record import Addresses
from trinity.reading.children import Child
from trinity.reading.errors import RunError
from trinity.reading.nats import NatsAccess
from trinity.runtime import files
from trinity.runtime.devices import visible_gpus
from trinity.runtime.process import as_parent, inherited

_MOST_SECONDS = 180.0
_NOWHERE = NatsAccess("nats://127.0.0.1:1")


@contextlib.contextmanager
def ask_services(plan: Plan) -> Iterator[Callable[[], Iterator[Problem | str]]]:
    """Starts the checks of an explorer and a trainer of this stage, which end with this block.

    The function in the context yields the problems with which they would end before they load weights. A machine
    without the stage's GPUs asks neither: machine_problems says so.
    """
    with tempfile.TemporaryDirectory(prefix="trinity-check-") as name:
        folder = Path(name)
        running = [(child, _start(child, folder)) for child in _children(plan, folder)]
        deadline = time.monotonic() + _MOST_SECONDS

        def answers() -> Iterator[Problem | str]:
            for child, process in running:
                yield from _answer(child, process, max(0.1, deadline - time.monotonic()), folder)

        try:
            yield answers
        finally:
            for _, process in running:
                process.kill()
                process.communicate()


def _children(plan: Plan, folder: Path) -> list[Child]:
    """The explorer and the trainer of a stage, as a run would start them."""
    config_file, mode = folder / "config.json", plan.config.mode
    files.write_json(config_file, dump(plan.config.model_copy(update={"stages": []})), mode=0o600)
    made = []
    try:
        placement = place(plan, visible_gpus())
        if mode in ("both", "train"):
            made.append(services.trainer(config_file, Addresses(), folder, placement))
        if mode != "train":
            made.append(services.explorer(plan, config_file, _NOWHERE, Addresses(), folder, placement))
    except RunError:
        return []
    return made


def _start(child: Child, folder: Path) -> "subprocess.Popen[bytes]":
    command = [*child.command[:-1], "check"]
    with (folder / f"{child.service}.err").open("wb") as errors:
        environment = {**inherited(), **child.environment, **as_parent()}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)


def _answer(child: Child, process: "subprocess.Popen[bytes]", seconds: float, folder: Path) -> Iterator[Problem | str]:
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        yield f"{child.service}: its own check did not end within {_MOST_SECONDS:g} s"
        return
    if process.returncode:
        lines = (folder / f"{child.service}.err").read_text(errors="replace").strip().splitlines()
        yield Problem(child.service, f"does not start: {lines[-1] if lines else f'exit code {process.returncode}'}")
        return
    for field, problem in json.loads(out):
        yield Problem(field, problem)
