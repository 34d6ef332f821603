"""The v1 interface of verifiers, from 0.4 on: a taskset, played by one agent.

An episode serves the policy as an OpenAI endpoint on this machine's loopback, under an address that only the episode
knows. verifiers' own interception relays each request of the agent to it. The agent is ChatHarness, unless the
taskset brings a harness that runs no code here.
"""

import contextlib
import copy
import functools
import json
import secrets
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.extras import require
from trinity.runtime.errors import InvalidInput

HARNESS = "trinity_chat_harness"  # verifiers finds a harness by the name of a top-level module
_CHATS = ("bash", "null", HARNESS)  # harnesses of verifiers that ChatHarness stands for
MAX_INDEX = 1_000_000


class Refused(Exception):
    """The bridge cannot play this environment. The text says what it must be instead."""


def rollout(module: str, task: Arguments, args: Arguments, policy: Any) -> Coroutine[Any, Any, Any]:
    """The episode of a task, by `policy`. Raises InvalidInput for a taskset or a task that cannot be played."""
    environment, tasks = load(module, args)
    for field in ("question", "prompt"):
        if field in task:
            raise task.wrong(
                field, task.get(field, None), "absent: a taskset of verifiers>=0.4 has its own; give index"
            )
    chosen = tasks[task.integer("index", -1, low=0, high=MAX_INDEX)]
    if chosen is None:
        raise task.wrong("index", task.get("index", None), f"from 0 to {len(tasks) - 1}")
    if problem := _needs_container(chosen):
        raise InvalidInput("task.index", f"is {chosen.data.idx}, whose task needs {problem}; use another task")
    return _episode(environment, chosen, policy)


class Tasks:
    """The tasks of a taskset by index, read up to the highest index so far: a taskset may be infinite."""

    def __init__(self, taskset: Any) -> None:
        self._taskset = taskset
        self._begin()

    def _begin(self) -> None:
        self._rest: Iterator[Any] = iter(self._taskset)
        self._read: list[Any] = []

    def __len__(self) -> int:
        return len(self._read)

    def __getitem__(self, index: int) -> Any:
        """Returns the task, or None beyond the end of the taskset. After an error the next call loads it again."""
        try:
            while len(self._read) <= index:
                self._read.append(next(self._rest))
        except StopIteration:
            return None
        except Exception:
            self._begin()
            raise
        return self._read[index]


def load(module: str, args: Arguments) -> tuple[Any, Tasks]:
    """The environment and its tasks, loaded once in this process. Raises InvalidInput."""
    given = args.text("env_id")
    try:
        return _load(module, json.dumps(args.mapping("env_args"), sort_keys=True))
    except Refused as refused:
        raise args.wrong("env_id", given, str(refused)) from None
    except Exception as error:
        wanted = f"a taskset that verifiers {require('verifiers', 'verifiers').__version__} can load ({error})"
        if hasattr(sys.modules.get(module), "load_environment"):
            wanted = "a taskset of the v1 interface; it has load_environment, which needs verifiers<0.4"
        raise args.wrong("env_id", given, wanted) from None


@functools.lru_cache(maxsize=4)
def _load(module: str, options: str) -> tuple[Any, Tasks]:
    v1 = require("verifiers.v1", "verifiers")
    sys.modules[HARNESS] = require("trinity.environments.bridges.verifiers_chat", "verifiers")
    config = v1.resolve_env_config({"taskset": {"id": module, **json.loads(options)}})
    agents = {name: value for name, value in config if isinstance(value, v1.AgentConfig)}
    if len(agents) != 1:
        raise Refused(f"an environment of one agent; it has {', '.join(agents) or 'none'}")
    ((name, agent),) = agents.items()
    harness = config.agent_harnesses()[name]
    if harness.id in _CHATS:
        harness = v1.harness_config_type(HARNESS)(id=HARNESS)
    elif (kind := type(v1.load_harness(harness))).NEEDS_CONTAINER or kind.EXECUTES_CODE:
        raise Refused(f"an environment whose agent chats; its harness {harness.id!r} runs programs")
    if v1.load_taskset(config.taskset).task_type().NEEDS_CONTAINER:
        raise Refused("an environment without containers; its tasks need one")
    changed = {"harness": harness, "runtime": v1.SubprocessConfig(), "model": None, "client": None}
    environment = v1.load_environment(config.model_copy(update={name: agent.model_copy(update=changed)}))
    return environment, Tasks(environment.taskset)


def _needs_container(task: Any) -> str:
    """Says what a task needs that only a container has; empty if nothing."""
    data = task.data
    if data.image is not None:
        return f"the container image {data.image!r}"
    if data.network_block or "*" not in data.network_allow:
        return "a container with limits to its network"
    return f"a container with the user {data.agent_user!r}" if data.agent_user is not None else ""


async def _episode(environment: Any, task: Any, policy: Any) -> Any:
    v1 = require("verifiers.v1", "verifiers")
    environment = copy.copy(environment)  # `serving` keeps what it opens in the object
    async with _endpoint(policy) as url, environment.serving():
        client = v1.EvalClientConfig(base_url=url, api_key_var="TRINITY_NO_KEY")
        return await environment.run_episode(task, v1.ModelContext(model="policy", client=client))


@contextlib.asynccontextmanager
async def _endpoint(policy: Any) -> AsyncIterator[str]:
    """Serves the policy to programs of this machine that know the URL."""
    web = require("aiohttp.web", "verifiers")
    openai = require("openai", "verifiers")

    async def complete(request: Any) -> Any:
        body = await request.json()
        try:
            if body.get("stream"):
                raise NotImplementedError("the policy answers whole chats; ask without stream")
            return web.json_response(await policy.post("/chat/completions", cast_to=_as_json, body=body))
        except openai.BadRequestError as error:
            problem = {"message": str(error), "code": "context_length_exceeded"}
        except (InvalidInput, NotImplementedError, KeyError) as error:
            problem = {"message": f"{type(error).__name__}: {error}", "code": "invalid_request"}
        return web.json_response({"error": problem}, status=400)

    application = web.Application(client_max_size=2**30)
    secret = secrets.token_urlsafe(24)
    application.router.add_post(f"/{secret}/v1/chat/completions", complete)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/{secret}/v1"
    finally:
        await runner.cleanup()


def _as_json(_: int, json: dict[str, Any]) -> dict[str, Any]:
    return json


def why(episode: Any) -> str:
    """Says what ended an episode."""
    return ", ".join(str(trace.stop_condition) for trace in episode.traces)


def fault(episode: Any) -> str:
    """The errors that an episode ended with; empty if it is scored."""
    if episode.ok:
        return ""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed without an error"


def reward(episode: Any) -> float:
    """Returns the mean of the agent's runs, of which most environments have one."""
    return sum(float(trace.reward) for trace in episode.traces) / len(episode.traces)


def metrics(episode: Any) -> dict[str, Any]:
    """Returns the unweighted rewards by name, and the metrics, of the agent's last run."""
    trace = episode.traces[-1]
    scores = {name: one.score for name, one in trace.rewards.items() if one is not None}
    turns = {"num_turns": trace.num_turns}
    return turns | {name: value for name, value in trace.metrics.items() if value is not None} | scores


def last_words(episode: Any) -> str:
    return ""
