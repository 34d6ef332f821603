"""Runs sandboxes of Harbor's runtimes. A separate interpreter runs this program, since Harbor needs Python 3.12.

runtimes.py writes requests as lines of JSON to its input, and reads answers with the same `id` from its output. At the
end of its input, as at the death of the service, it ends all sandboxes. A sandbox that outlives this program ends by
the time to live that Harbor asks of each provider.
"""

import asyncio
import base64
import contextlib
import json
import math
import secrets
import shlex
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

_CREATED_AT_ONCE = 8
_TRIES = 3
_START_SECONDS = 95.0
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
    """Harbor can never do this: the task or the configuration is wrong."""


class Sandboxes:
    """The live sandboxes, by the names that their callers gave them."""

    def __init__(self) -> None:
        self._live: dict[str, Any] = {}
        self._first_processes: dict[str, list[str]] = {}
        self._creations: dict[str, asyncio.Task[Any] | None] = {}
        self._slots = asyncio.Semaphore(_CREATED_AT_ONCE)

    async def create(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Starts a sandbox. A start that fails is tried again, after what it left is ended."""
        from harbor.environments.base import SandboxBuildFailedError

        name = asked["name"]
        self._creations[name] = asyncio.current_task()
        async with self._slots:
            for pause in (*_PAUSES[: _TRIES - 1], None):
                runtime = self._live[name] = _make(asked)
                try:
                    await asyncio.wait_for(runtime.start(force_build=False), _START_SECONDS)
                    listed = await runtime.exec(_bash(_LIST), timeout_sec=30, user="root")
                    self._first_processes[name] = (listed.stdout or "").split()
                    break
                except Exception as error:
                    await self._stop(name)
                    if isinstance(error, SandboxBuildFailedError):
                        raise Wrong(str(error)) from None
                    if pause is None:
                        raise
                    await asyncio.sleep(pause * (0.5 + secrets.randbelow(1000) / 1000))
        self._creations.pop(name, None)
        asyncio.get_running_loop().call_later(asked["ttl_seconds"], lambda: asyncio.ensure_future(self.end(asked)))
        return {}

    async def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Runs a command with its input and output in files, so that neither its length nor what it leaves behind in
        the background matters.
        """
        if (runtime := self._live.get(asked["name"])) is None:
            raise RuntimeError("the sandbox ended: its time to live is over")
        if asked["alone"]:
            cleared = await runtime.exec(
                _bash(_CLEAR, *self._first_processes[asked["name"]]), timeout_sec=60, user="root"
            )
            if cleared.return_code:
                raise RuntimeError(f"processes of the policy cannot be ended: {cleared.stdout or cleared.stderr}")
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
        done = await asyncio.wait_for(
            runtime.exec(
                _bash(script),
                cwd=asked["cwd"] or None,
                env=asked["env"] or None,
                timeout_sec=math.ceil(seconds + _GRACE_SECONDS),
            ),
            seconds + 2 * _GRACE_SECONDS,
        )
        return {"code": done.return_code, "output": done.stdout or "", "problem": done.stderr or ""}

    async def end(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Ends a sandbox, or its creation. Returns an empty answer also where there is none."""
        if (creation := self._creations.pop(asked["name"], None)) is not None:
            creation.cancel()
            await asyncio.wait({creation})
        await self._stop(asked["name"])
        return {}

    async def _stop(self, name: str) -> None:
        """Ends what a name has, with some patience for its provider."""
        self._first_processes.pop(name, None)
        if (runtime := self._live.pop(name, None)) is None:
            return
        for pause in (*_PAUSES, None):
            try:
                await asyncio.wait_for(runtime.stop(delete=True), _STOP_SECONDS)
                break
            except Exception as error:
                if pause is None:
                    _complain(f"sandbox {name} cannot be ended, and ends by its time to live: {error!r}")
                    break
                await asyncio.sleep(pause)

    async def end_all(self) -> None:
        await asyncio.gather(*(self.end({"name": name}) for name in list(self._live)))


def _make(asked: dict[str, Any]) -> Any:
    """A runtime of Harbor's, not yet started. Raises Wrong for what Harbor does not know or cannot do."""
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.environment_type import EnvironmentType
    from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
    from harbor.models.trial.paths import TrialPaths

    runtime, folder = asked["runtime"], Path(asked["folder"])
    try:
        chosen = {"import_path": runtime} if ":" in runtime else {"type": EnvironmentType(runtime)}
        EnvironmentFactory.run_preflight(**{"type": None, **chosen}, kwargs=asked["options"])
        make = EnvironmentFactory.create_environment
        if ":" in runtime:
            make = EnvironmentFactory.create_environment_from_import_path
        network = NetworkMode.PUBLIC if asked["network"] else NetworkMode.NO_NETWORK
        return make(
            **chosen,
            environment_dir=folder / "environment",
            environment_name="trinity",
            session_id=asked["name"],
            trial_paths=TrialPaths(folder / "trial"),
            task_env_config=EnvironmentConfig.model_validate(asked["config"]),
            network_policy=NetworkPolicy(network_mode=network),
            **asked["options"],
        )
    except (ValueError, TypeError, ImportError, SystemExit) as error:
        raise Wrong(" ".join(str(error).split())) from None


def _bash(script: str, *words: str) -> str:
    return shlex.join(["bash", "-c", script, "bash", *words])


def _complain(problem: str) -> None:
    print(problem, file=sys.stderr, flush=True)


async def main() -> None:
    loop, sandboxes = asyncio.get_running_loop(), Sandboxes()
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a provider's library prints is no answer
    does: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
        "create": sandboxes.create,
        "run": sandboxes.run,
        "end": sandboxes.end,
    }

    async def answer(asked: dict[str, Any]) -> None:
        try:
            said: dict[str, Any] = {"done": await does[asked["do"]](asked)}
        except Exception as error:
            what = " ".join(str(error).split()) or type(error).__name__
            said = {"problem": what[:2000], "lasting": isinstance(error, Wrong)}
        answers.write(json.dumps({"id": asked["id"], **said}) + "\n")
        answers.flush()

    requests = asyncio.StreamReader(limit=_MAX_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
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


if __name__ == "__main__":
    asyncio.run(main())
