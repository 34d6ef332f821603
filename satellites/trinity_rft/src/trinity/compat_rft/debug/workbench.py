"""The processes that one workflow needs: the environment service, and a process with one engine."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trinity.cli.supervise.processes import services
from trinity.cli.supervise.processes.devices import place
from trinity.config import Config, dump, make_plan
from trinity.config.run_record import Addresses
from trinity.data.experience import Task
from trinity.data.wire import task_to_json
from trinity.reading.children import Child, stop_all
from trinity.reading.errors import RunError
from trinity.reading.job import identify
from trinity.reading.nats import NatsAccess, wait_until_open
from trinity.runtime import files
from trinity.runtime.devices import visible_gpus
from trinity.runtime.process import as_parent, inherited
from trinity.runtime.settings import NO_RUN, split_address

_OPEN_SECONDS = 60.0
_STOP_SECONDS = 10.0


class Workbench:
    """Processes of a stage in a temporary folder, until `close`.

    After a failure the folder stays, with the logs. Raises RunError if a process cannot start or dies.
    """

    def __init__(self, stage: Config) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="trinity-debug-"))
        rollout = stage.explorer.rollout_model.model_copy(update={"engine_num": 1})
        plain = {"record": False, "traffic": None}
        explorer = stage.explorer.model_copy(update={"rollout_model": rollout, "name": "debug", **plain})
        changes = {"mode": "serve", "checkpoint_root_dir": str(self._folder), "explorer": explorer, "stages": []}
        self._plan = make_plan(stage.model_copy(update=changes))
        self._failed = False
        identify(self._folder, starts_services=True)
        self._environment = services.environment(self._log_dir, self._folder, {"LOG_RUN": NO_RUN})
        self._engine = self._engine_child()

    @property
    def _log_dir(self) -> Path:
        return self._folder / "log"

    def _engine_child(self) -> Child:
        plan, config_file = self._plan, self._folder / "config.json"
        files.write_json(config_file, dump(plan.config), mode=0o600)
        nowhere, addresses = NatsAccess("nats://127.0.0.1:1"), Addresses(environment=self._environment.address)
        placement = place(plan, visible_gpus())
        child = services.explorer(plan, config_file, nowhere, addresses, self._log_dir, placement)
        child.command = [sys.executable, "-m", "trinity.compat_rft.debug.engine"]
        return child

    def start(self) -> None:
        """Starts the processes. Call it from the main thread: children end with the thread that made them."""
        self._environment.start()
        child = self._engine
        with child.output.open("ab") as out:
            child.process = subprocess.Popen(
                list(child.command),
                env={**inherited(), **child.environment, **as_parent()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                start_new_session=True,
            )
        self._wait_for_environment()
        self._read()

    def run(self, task: Task) -> dict[str, Any]:
        """Runs one attempt at the task. Returns seconds, failure and experiences: see `engine`."""
        return self._ask({"task": task_to_json(task)})

    def reload(self) -> str:
        """Imports the plugin files again in both processes. Returns the problem, or an empty string."""
        problem = str(self._ask({"reload": True})["problem"])
        if not problem:
            asyncio.run(stop_all([self._environment], _STOP_SECONDS))
            self._environment.start()
            self._wait_for_environment()
        return problem

    def close(self) -> None:
        process = self._engine.process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            try:
                process.wait(timeout=_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._engine.end_group(signal.SIGTERM)
        asyncio.run(stop_all([self._engine, self._environment], _STOP_SECONDS))
        if not self._failed:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_environment(self) -> None:
        host, port = split_address(self._environment.address, "address of environment")
        if not wait_until_open(host, port, _OPEN_SECONDS):
            raise self._death(self._environment)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        process = self._engine.process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._death(self._engine) from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        process = self._engine.process
        assert process is not None and process.stdout is not None
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._death(self._engine)
        found: dict[str, Any] = json.loads(line)
        return found

    def _death(self, child: Child) -> RunError:
        self._failed = True
        return RunError(f"{child.name} ended: {child.last_error()}; its log is in {self._log_dir}")
