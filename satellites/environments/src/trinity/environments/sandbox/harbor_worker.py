"""Runs sandboxes of Harbor's runtimes. A separate interpreter runs this program, since Harbor needs Python 3.12.

runtimes.py writes requests as lines of JSON to its input, and reads answers with the same `id` from its output. At the
end of its input, as at the death of the service, it ends all sandboxes and removes its folder, the argument. A sandbox
that outlives this program, or whose name a lost reply had, ends by the time to live that its provider was asked for.
"""

import asyncio
import base64
import contextlib
import importlib.util
import json
import math
import os
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CREATED_AT_ONCE = 8
_TRIES = 3
_AGAIN_SECONDS = 30.0  # that a further try needs
_THREADS = 128  # agent-sandbox holds one for each command, of up to 64 episodes
_DAY = 86_400
_STOP_SECONDS = 30.0
_PAUSES = (0.5, 2.0, 8.0, 30.0, 120.0)
_GRACE_SECONDS = 10.0
_MAX_LINE = 64 * 1024**2

# The processes of a new sandbox, and the end of all others but this command's own. Threads of a kernel have no `exe`.
_LIST = 'for d in /proc/[0-9]*; do s=$(cat $d/stat 2>/dev/null) && s=(${s##*) }) && echo "${d#/proc/}:${s[19]}"; done'
_CLEAR = """keep=" $* "; own=" "; p=$$
while [ "${p:-0}" -gt 1 ]; do own="$own$p "; p=$(sed -n 's/^PPid:[[:space:]]*//p' /proc/$p/status 2>/dev/null); done
for round in {1..20}; do
  found=
  for d in /proc/[0-9]*; do
    p=${d#/proc/}; s=$(cat $d/stat 2>/dev/null) || continue; s=(${s##*) })
    [[ $keep == *" $p:${s[19]} "* || $own == *" $p "* ]] && continue
    readlink $d/exe > /dev/null 2>&1 && kill -9 $p 2>/dev/null && found=1
  done
  [ -z "$found" ] && exit 0
done
exit 1"""


class Wrong(Exception):
    """Harbor can never do this: the field, of the task or of the arguments, is wrong."""

    def __init__(self, problem: str, field: str) -> None:
        super().__init__(problem)
        self.field = field


@dataclass
class _Sandbox:
    """`creation`: while it is created; `timer`: ends it after its time to live."""

    creation: "asyncio.Task[Any] | None"
    runtime: Any = None
    timer: asyncio.TimerHandle | None = None
    first_processes: list[str] = field(default_factory=list)


class Sandboxes:
    """The sandboxes, by the names that their callers gave them."""

    def __init__(self) -> None:
        self._all: dict[str, _Sandbox] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_CREATED_AT_ONCE)

    async def create(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Starts a sandbox. A start that fails is tried again, after what it left is ended."""
        from harbor.environments.base import SandboxBuildFailedError

        name, loop = asked["name"], asyncio.get_running_loop()
        end = loop.time() + asked["create_seconds"]
        one = self._all[name] = _Sandbox(asyncio.current_task())
        async with self._slots:
            for number, pause in enumerate((*_PAUSES[: _TRIES - 1], None)):
                one.runtime = _make(asked, f"{name}-{number}")  # a try whose answer was lost may hold its name
                try:
                    await asyncio.wait_for(one.runtime.start(force_build=False), asked["start_seconds"])
                    listed = await _exec(asked["runtime"], one.runtime, _bash(_LIST), timeout_sec=30, user="root")
                    one.first_processes = listed["output"].split()
                    break
                except Exception as error:
                    _complain(f"sandbox {name}-{number} does not start: {_error_text(error)}")
                    await self._stop(name, one)
                    if isinstance(error, SandboxBuildFailedError):
                        raise Wrong(str(error), "task.environment") from None
                    if isinstance(error, PermissionError):
                        raise Wrong(str(error), "args.backend") from None
                    if pause is None or end - loop.time() < _AGAIN_SECONDS:
                        raise
                    await asyncio.sleep(pause * (0.5 + secrets.randbelow(1000) / 1000))
        one.creation = None
        one.timer = loop.call_later(asked["ttl_seconds"], lambda: self._begin(self._end(name)))
        return {}

    async def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Runs a command with its input and output in files, so that neither its length nor what it leaves behind in
        the background matters.
        """
        if (one := self._all.get(asked["name"])) is None:
            raise RuntimeError("the sandbox ended: its time to live is over")
        runtime = one.runtime
        if asked["alone"]:
            clear = _bash(_CLEAR, *one.first_processes)
            cleared = await _exec(asked["runtime"], runtime, clear, timeout_sec=60, user="root")
            if cleared["code"]:
                reason = cleared["output"] or cleared["problem"]
                raise RuntimeError(f"processes of the policy cannot be ended: {reason}")
        place, source = f"/tmp/.trinity-{secrets.token_hex(6)}", "/dev/null"
        if asked["stdin"]:
            source = f"{place}.in"
            with tempfile.NamedTemporaryFile() as file:
                file.write(base64.b64decode(asked["stdin"]))
                file.flush()
                await runtime.upload_file(file.name, source)
        seconds = asked["seconds"]
        command, most = shlex.join(asked["argv"]), asked["output_bytes"] + 1
        script = (
            f"exec 2> /dev/null; timeout -s KILL {seconds:g} {command} < {source} > {place}.out 2>&1; code=$?; "
            f"head -c {most} {place}.out | base64 -w 0; rm -f {place}.in {place}.out; exit $code"
        )
        return await asyncio.wait_for(
            _exec(
                asked["runtime"],
                runtime,
                _bash(script),
                cwd=asked["cwd"] or None,
                env=asked["env"] or None,
                timeout_sec=math.ceil(seconds + _GRACE_SECONDS),
            ),
            seconds + 2 * _GRACE_SECONDS,
        )

    async def end(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Ends a sandbox, or its creation. Returns an empty answer also where there is none."""
        await asyncio.shield(self._begin(self._end(asked["name"])))
        return {}

    async def end_all(self) -> None:
        for name in self._all:
            self._begin(self._end(name))
        while self._ends:
            await asyncio.wait(self._ends)

    def _begin(self, end: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Starts an end that outlives its caller: Harbor forgets a sandbox whose end is interrupted."""
        task = asyncio.get_running_loop().create_task(end)
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)
        return task

    async def _end(self, name: str) -> None:
        if (one := self._all.pop(name, None)) is None:
            return
        if one.timer is not None:
            one.timer.cancel()
        if one.creation is not None:
            one.creation.cancel()
            await asyncio.wait({one.creation})
        await self._stop(name, one)

    async def _stop(self, name: str, one: _Sandbox) -> None:
        """Ends what a start left, with some patience for its provider."""
        runtime, one.runtime = one.runtime, None
        if runtime is not None:
            await asyncio.shield(self._begin(_stop(name, runtime)))


async def _exec(name: str, runtime: Any, command: str, **options: Any) -> dict[str, Any]:
    """Runs a command. Raises RuntimeError if the result has other types than Harbor's ExecResult."""
    done = await runtime.exec(command, **options)
    code, *texts = (getattr(done, field, None) for field in ("return_code", "stdout", "stderr"))
    if type(code) is not int or not all(isinstance(text, str | None) for text in texts):
        types = f"return_code {code!r:.50}, stdout {texts[0]!r:.50} and stderr {texts[1]!r:.50}"
        raise RuntimeError(f"exec of {name} returned {types}; must be an integer, a text and a text")
    return {"code": code, "output": texts[0] or "", "problem": texts[1] or ""}


async def _stop(name: str, runtime: Any) -> None:
    for pause in (*_PAUSES, None):
        try:
            await asyncio.wait_for(runtime.stop(delete=True), _STOP_SECONDS)
            return
        except Exception as error:
            if pause is None or isinstance(error, PermissionError):
                _complain(f"sandbox {name} cannot be ended, and ends by its time to live: {_error_text(error)}")
                return
            await asyncio.sleep(pause)


@contextlib.contextmanager
def _refused(field: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, ImportError, FileNotFoundError, SystemExit) as error:
        raise Wrong(" ".join(str(error).split()), field) from None


def _leases(seconds: float) -> dict[str, dict[str, Any]]:
    """Options by which providers end a sandbox, where the operator gives no others. E2B and Modal allow a day."""
    whole = math.ceil(seconds)
    return {
        "e2b": {"sandbox_timeout_sec": min(whole, _DAY), "renew_interval_sec": 0},
        "modal": {"sandbox_timeout_secs": min(whole, _DAY)},
        "daytona": {"ttl_minutes": math.ceil(whole / 60)},
        "agent-sandbox": {"lease_seconds": whole},
    }


def _make(asked: dict[str, Any], session: str) -> Any:
    """A runtime of Harbor's, not yet started. Raises Wrong for what Harbor does not know or cannot do."""
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.environment_type import EnvironmentType
    from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
    from harbor.models.trial.paths import TrialPaths

    runtime, folder = asked["runtime"], Path(asked["folder"])
    # A start that fails at its last moment leaves a sandbox that has already lived for `start_seconds`.
    leases = _leases(asked["ttl_seconds"] + asked["start_seconds"]).get(runtime, {})
    options = asked["options"] if next(iter(leases), "") in asked["options"] else {**leases, **asked["options"]}
    with _refused("task.config.environment"):
        config = EnvironmentConfig.model_validate(asked["config"])
    with _refused("args.backend"):
        if runtime == "agent-sandbox":
            runtime, options = _agent_sandbox(), {"ready_seconds": 0.9 * asked["start_seconds"], **options}
        chosen = {"import_path": runtime} if ":" in runtime else {"type": EnvironmentType(runtime)}
        EnvironmentFactory.run_preflight(**{"type": None, **chosen}, kwargs=options)
        make = EnvironmentFactory.create_environment
        if ":" in runtime:
            make = EnvironmentFactory.create_environment_from_import_path
        network = NetworkMode.PUBLIC if asked["network"] else NetworkMode.NO_NETWORK
        return make(
            **chosen,
            environment_dir=folder / "environment",
            environment_name="trinity",
            session_id=session,
            trial_paths=TrialPaths(folder / "trial"),
            task_env_config=config,
            network_policy=NetworkPolicy(network_mode=network),
            **options,
        )


def _agent_sandbox() -> str:
    """The class for Harbor; its file is loaded by its path, since Harbor's interpreter may not have Trinity."""
    if (name := "agent_sandbox") not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("agent_sandbox.py"))
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        sys.modules[name] = module
    return f"{name}:AgentSandbox"


def _bash(script: str, *words: str) -> str:
    return shlex.join(["bash", "-c", script, "bash", *words])


def _error_text(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:2000]


def _complain(problem: str) -> None:
    print(problem, file=sys.stderr, flush=True)


async def main() -> None:
    loop, sandboxes = asyncio.get_running_loop(), Sandboxes()
    loop.set_default_executor(ThreadPoolExecutor(_THREADS))
    # What a provider's library prints is no answer, also if a child or C code does it; nor do these read requests. The
    # output stays open until the process dies: its end tells that to the reader.
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", closefd=False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    does: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
        "create": sandboxes.create,
        "run": sandboxes.run,
        "end": sandboxes.end,
    }

    async def answer(asked: dict[str, Any]) -> None:
        try:
            said = json.dumps({"id": asked["id"], "done": await does[asked["do"]](asked)})
        except Exception as error:
            field = error.field if isinstance(error, Wrong) else ""
            said = json.dumps({"id": asked["id"], "problem": _error_text(error), "field": field})
        answers.write(said + "\n")
        answers.flush()

    requests = asyncio.StreamReader(limit=_MAX_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), questions)
    running: set[asyncio.Task[None]] = set()
    async for line in requests:
        task = loop.create_task(answer(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    with contextlib.suppress(OSError):
        await sandboxes.end_all()
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(main())
