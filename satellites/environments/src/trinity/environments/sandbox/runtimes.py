"""A sandbox on another machine, by a runtime of Harbor's: Daytona, E2B, Modal, Kubernetes and others.

Harbor runs in a separate process (harbor_worker.py), which serves all sandboxes of a service.
"""

import base64
import contextlib
import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

import structlog

from trinity.environments.sandbox.harbor import Harbor
from trinity.environments.sandbox.limits import Limits
from trinity.environments.sandbox.sandbox import Output, Sandbox
from trinity.runtime.errors import InvalidInput, Unavailable

log = structlog.get_logger(__name__)

RUNTIMES_VARIABLE = "TRINITY_ENVIRONMENT_SANDBOX_RUNTIMES"
PYTHON_VARIABLE = "TRINITY_ENVIRONMENT_SANDBOX_HARBOR"
_WORKER = Path(__file__).with_name("harbor_worker.py")
_HAS_HARBOR = "import importlib.util, sys; sys.exit(importlib.util.find_spec('harbor') is None)"
_CREATE_SECONDS = 115.0  # less than a reset has
_START_SECONDS = 95.0  # of one of three tries
_END_SECONDS = 5.0  # the process continues to end a sandbox afterwards
_KILLED = 137
# What a task may say of its machine. Harbor would fill `env` from the service's own environment variables.
_OF_TASKS = ("docker_image", "workdir", "cpus", "build_timeout_sec")


def allowed() -> dict[str, dict[str, Any]]:
    """The runtimes that the operator allows, and Harbor's options of each. Raises InvalidInput."""
    said = os.environ.get(RUNTIMES_VARIABLE) or "{}"
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(options, dict) for options in found.values()):
        example = '{"e2b": {}}'
        raise InvalidInput(RUNTIMES_VARIABLE, f"is {said[:100]!r}, must be an object of options by runtime: {example}")
    return found


def options_of(runtime: str) -> dict[str, Any]:
    """Harbor's options of a runtime. Raises InvalidInput unless the operator allows the runtime."""
    if runtime not in (found := allowed()):
        what = f"is {runtime[:100]!r}, must be bubblewrap, docker or a runtime of Harbor's that the operator of the "
        what += f"environment service allows by {RUNTIMES_VARIABLE} ({', '.join(sorted(found)) or 'none'})"
        raise InvalidInput("args.backend", what)
    return found[runtime]


def check_task(runtime: str, task: Harbor) -> None:
    """Raises InvalidInput for a task that a runtime does not play."""
    if composed := [path for path in task.context if path.startswith("docker-compose.")]:
        what = f"has {composed[0]}, which may reach this machine; a runtime of Harbor's takes a Dockerfile alone"
        raise InvalidInput("task.environment", what)
    if runtime == "agent-sandbox" and not task.image:
        what = "is not there, and agent-sandbox builds no image of a Dockerfile"
        raise InvalidInput("task.config.environment.docker_image", what)


class HarborSandbox(Sandbox):
    """A sandbox of a runtime of Harbor's. Its provider builds the task's image, or takes it from where it is."""

    def __init__(self, limits: Limits, runtime: str, options: dict[str, Any], task: Harbor) -> None:
        """Raises InvalidInput for what Harbor cannot do, and Unavailable if its provider starts none."""
        super().__init__(limits)
        self.name = f"trinity-{secrets.token_hex(8)}"
        self._runtime, self._worker = runtime, worker()
        self._folder = self._worker.folder / self.name
        for path, file in task.context.items():
            place = self._folder / "environment" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.data)
            place.chmod(0o755 if file.executable else 0o644)
        (self._folder / "environment").mkdir(parents=True, exist_ok=True)
        machine = {name: task.machine[name] for name in _OF_TASKS if name in task.machine}
        machine["memory_mb"] = limits.memory_mib
        if task.disk_mib is not None:
            machine["storage_mb"] = limits.disk_mib
        try:
            self._ask(
                "create",
                _CREATE_SECONDS,
                options=options,
                folder=str(self._folder),
                config=machine,
                network=limits.network,
                ttl_seconds=limits.ttl_seconds,
                create_seconds=_CREATE_SECONDS,
                start_seconds=_START_SECONDS,
            )
        except (InvalidInput, Unavailable) as error:
            self.close()
            what = f"{runtime} starts no sandbox: "
            if isinstance(error, InvalidInput):
                raise InvalidInput(error.field, what + str(error).removeprefix(f"{error.field}: ")) from None
            raise Unavailable(f"{what}{error}") from None

    def _run(self, argv: list[str], seconds: float, stdin: bytes, cwd: str, env: dict[str, str], alone: bool) -> Output:
        """An empty `cwd` is the image's folder."""
        most, begun = self.limits.output_bytes, time.monotonic()
        done = self._ask(
            "run",
            seconds + 100,
            argv=argv,
            seconds=seconds,
            stdin=base64.b64encode(stdin).decode(),
            cwd=cwd,
            env=env,
            alone=alone,
            output_bytes=most,
        )
        try:
            output = base64.b64decode(done["output"], validate=True)
        except ValueError:
            raise Unavailable(
                f"the sandbox answers nonsense: {done['output'][:100]!r} {done['problem'][:200]}"
            ) from None
        ended = "time" if done["code"] == _KILLED and time.monotonic() - begun >= seconds else ""
        return Output(done["code"], output[:most].decode(errors="replace"), len(output) > most, ended)

    def close(self) -> None:
        with contextlib.suppress(Unavailable):  # the process continues, where the provider is slow
            self._ask("end", _END_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, do: str, wait_seconds: float, **about: Any) -> dict[str, Any]:
        return self._worker.ask(wait_seconds, do=do, name=self.name, runtime=self._runtime, **about)


class Worker:
    """The process that holds all sandboxes, and who waits for its answers."""

    def __init__(self, python: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="trinity-harbor-"))  # of its sandboxes; it removes it when it ends
        line = [python, "-P", "-u", str(_WORKER), str(self.folder)]  # -P: our harbor.py is not to be Harbor
        # A kill of the service's process group spares this process, which ends all sandboxes, and then itself.
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._ids, self._lock = count(), threading.Lock()
        threading.Thread(target=self._read, name="harbor-worker", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, wait_seconds: float, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises InvalidInput where it can never be done, else Unavailable."""
        answer: Future[dict[str, Any]] = Future()
        number = next(self._ids)
        line = json.dumps({"id": number, **request}).encode() + b"\n"
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._waiting[number] = answer
                self._process.stdin.write(line)
                self._process.stdin.flush()
            said = answer.result(wait_seconds)
        except TimeoutError:
            raise Unavailable(f"no answer in {wait_seconds:g} s") from None
        except OSError:
            raise Unavailable(_GONE) from None
        finally:
            self._waiting.pop(number, None)
        if "problem" in said:
            raise InvalidInput(said["field"], said["problem"]) if said["field"] else Unavailable(said["problem"])
        done: dict[str, Any] = said["done"]
        return done

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                said = json.loads(line)
                answer = self._waiting.get(said["id"])
            except (ValueError, TypeError, KeyError, RecursionError):
                log.warning("environment.sandbox.no_answer", line=line[:200].decode(errors="replace"))
                continue
            if answer is not None:
                answer.set_result(said)
        self._process.kill()  # it lives if only its output ended
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        for answer in list(self._waiting.values()):
            answer.set_result({"problem": _GONE, "field": ""})


_GONE = "the process that runs Harbor ended, and its sandboxes with it"
_lock = threading.Lock()
_running: list[Worker] = []


def worker() -> Worker:
    """The process of this service, started where there is none. Raises InvalidInput where no interpreter has Harbor."""
    with _lock:
        if not _running or not _running[0].is_running:
            python = os.environ.get(PYTHON_VARIABLE) or sys.executable
            _require_harbor(python)
            _running[:] = [Worker(python)]
        return _running[0]


@functools.cache
def _require_harbor(python: str) -> None:
    try:
        has_harbor = not subprocess.run([python, "-P", "-c", _HAS_HARBOR], capture_output=True, timeout=60).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidInput("args.backend", f"{PYTHON_VARIABLE} is {python}, which does not start: {error}") from None
    if not has_harbor:
        how = "python3.12 -m venv harbor && harbor/bin/pip install 'harbor[e2b]'"
        raise InvalidInput(
            "args.backend", f"{python} has no Harbor: {how}, and {PYTHON_VARIABLE}=$PWD/harbor/bin/python"
        )
