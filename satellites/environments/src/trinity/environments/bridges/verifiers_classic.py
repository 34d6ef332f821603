"""The classic interface of verifiers, below 0.4: load_environment, a dataset, a rubric."""

import contextlib
import functools
import json
import signal
import threading
from collections.abc import Coroutine, Iterator
from importlib import metadata
from typing import Any
from unittest import mock

from trinity.environments.arguments import Arguments
from trinity.environments.bridges.messages import has_replied, shown
from trinity.environments.extras import require


def rollout(module: str, task: Arguments, args: Arguments, policy: Any) -> Coroutine[Any, Any, Any]:
    """The rollout of a row, by `policy`. Raises InvalidInput for an environment or a row that cannot be loaded."""
    environment = load(module, args)
    row = read_row(environment, task, args.choice("split", "train", ["train", "eval"]))
    sampling = dict(getattr(environment, "sampling_args", None) or {})
    running: Coroutine[Any, Any, Any] = environment.run_rollout(row, client(environment, policy), "policy", sampling)
    return running


def load(module: str, args: Arguments) -> Any:
    """The environment, loaded once in this process. Raises InvalidInput if it cannot be."""
    try:
        return _load(module, json.dumps(args.mapping("env_args"), sort_keys=True))
    except Exception as error:
        wanted = f"an environment that verifiers {metadata.version('verifiers')} can load ({error})"
        if any(name in f"{error} {error.__cause__}" for name in ("load_environment", "verifiers.v1")):
            wanted += "; tasksets of the v1 interface need verifiers>=0.4"
        raise args.wrong("env_id", args.text("env_id"), wanted) from None


@functools.lru_cache(maxsize=4)
def _load(module: str, options: str) -> Any:
    with _signals_restored():
        return require("verifiers", "verifiers").load_environment(module, **json.loads(options))


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Environments take SIGINT and SIGTERM for themselves, which are the worker's.

    `trinity check` loads them in another thread, where Python refuses to: there they take none.
    """
    if threading.current_thread() is not threading.main_thread():
        with mock.patch.object(signal, "signal"):
            yield
        return
    kept = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in kept:
            signal.signal(number, handler)


def client(environment: Any, policy: Any) -> Any:
    """The client as the installed verifiers takes it: OpenAI's own, or since 0.1.11 wrapped."""
    clients = getattr(require("verifiers", "verifiers"), "clients", None)
    if clients is None:
        return policy
    chat = environment.message_type == "chat"
    return (clients.OpenAIChatCompletionsClient if chat else clients.OpenAICompletionsClient)(policy)


def read_row(environment: Any, task: Arguments, split: str) -> dict[str, Any]:
    """The row as the environment's own dataset has it. Raises InvalidInput."""
    chat = environment.message_type == "chat"
    if "question" not in task and "prompt" not in task:
        dataset = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
        if "index" not in task:
            raise task.wrong("index", None, f"from 0 to {len(dataset) - 1}, unless the row has a question or a prompt")
        found = dict(dataset[task.integer("index", 0, low=0, high=len(dataset) - 1)])
        return {**found, "prompt": _conversation(found.get("prompt"))} if chat else found
    prompt = task.get("prompt", None)
    if prompt is None:
        prompt = (
            [*(environment.few_shot or []), *_conversation(task.text("question"))] if chat else task.text("question")
        )
    elif chat:
        prompt = _conversation(prompt)
    if isinstance(prompt, list) and environment.system_prompt and prompt[:1] and prompt[0].get("role") != "system":
        prompt = [{"role": "system", "content": environment.system_prompt}, *prompt]
    row = {"prompt": prompt, "answer": task.get("answer", ""), "info": task.mapping("info"), "example_id": 0}
    return row | ({"task": task.text("task")} if "task" in task else {})


def _conversation(prompt: Any) -> Any:
    """Returns a prompt that is text, as some packages have it, as a user's message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def why(output: Any) -> str:
    """Says what ended a rollout."""
    return str(output.get("stop_condition"))


def fault(output: Any) -> str:
    """The error that a rollout ended with, unless the policy's use of tools was the cause: that is scored."""
    error = output.get("error")
    if error is None:
        return ""
    kind = getattr(require("verifiers", "verifiers"), str(error["error"]), None)
    if isinstance(kind, type) and issubclass(kind, require("verifiers", "verifiers").ToolError):
        return ""
    return str(error["error_chain_repr"])


def reward(output: Any) -> Any:
    return output["reward"] or 0.0


def metrics(output: Any) -> dict[str, Any]:
    return output["metrics"] or {}


def last_words(output: Any) -> str:
    """Returns the messages after the policy's last reply."""
    return shown(has_replied(output.get("completion")))
