"""Environments of Prime Intellect's verifiers.

Their rollout loop runs as it is, with its own set-up, stop conditions, clean-up and rubric. The model it drives is an
AskedPolicy, so that each time it asks for a completion is one turn of the episode.
"""

import asyncio
import contextlib
import functools
import json
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

from trinity.api.numbers import real_number
from trinity.environments.allowed import check_module
from trinity.environments.arguments import Arguments
from trinity.environments.bridges.messages import assistant, has_replied, news, shown, split_system, until_stop
from trinity.environments.extras import needs, require
from trinity.environments.game import TextGame, Turn, TurnRules
from trinity.environments.replies import Reply
from trinity.runtime.errors import Unavailable
from trinity.sdk.environment import Description, Observation

_ENVIRONMENT_ID = re.compile(r"(?:[\w.-]{1,100}/)?[A-Za-z][\w-]{0,99}", re.ASCII)
_MAX_METRICS = 80


@needs("verifiers", "verifiers", "verifiers")
class Verifiers(TextGame):
    """A rollout of an installed verifiers environment. Reward: its rubric's, at the end.

    Arguments: `env_id` (as for verifiers.load_environment; a package of that name which requires verifiers
    must be installed, or the operator allows the module), `env_args`,
    `split` (train) of the environment's dataset, `success_reward` (1). A row is {"index"} in that dataset, or a row of
    its kind: {"question" or "prompt", "answer", "info", "task"}. Replies are taken as they are; where the environment
    has tools, a reply calls them with <tool_call>{"name", "arguments"}</tool_call>. A conversation that reaches
    `max_steps` is ended and scored like one too long for the model. Metrics: the rubric's, after `rubric_`.
    """

    description = Description(
        "verifiers", "An environment of verifiers.", step_timeout_seconds=120, reset_timeout_seconds=120
    )
    # They take over the process's signals, so they need its main thread; their imports are heavy.
    isolation = "process"
    episodes_per_process = 8
    memory_limit_mib = 4096
    defaults = TurnRules(max_steps=100, list_actions=False)

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        require("verifiers", "verifiers")
        from trinity.environments.bridges.asked_policy import AskedPolicy, Asking

        environment_id, options = args.text("env_id"), args.mapping("env_args")
        split = args.choice("split", "train", ["train", "eval"])
        self.success_reward = args.number("success_reward", 1.0)
        environment = load(environment_id, options, args)
        policy = AskedPolicy()
        row = read_row(environment, task, split)
        sampling = dict(getattr(environment, "sampling_args", None) or {})
        rollout = environment.run_rollout(row, _client(environment, policy), "policy", sampling)
        self.rollout = Asking(_loop(), policy, rollout)
        self.held.callback(self.rollout.end)
        self._question: Any = self.rollout.next()
        if self._question is None:
            output = self.rollout.result()
            reason = _fault(output) or output.get("stop_condition")
            raise Unavailable(f"verifiers: the rollout was over before it began: {reason}")
        self._news: dict[str, Any] = {}
        text = self._conversation(self._question)
        self.goal = shown(split_system(self._question.messages)[1])
        return text

    def _conversation(self, question: Any) -> str:
        """The begin of a conversation. The system prompt is the instructions: the explorer puts them there."""
        self.tools = [_tool(entry) for entry in question.tools]
        self.instructions, messages = split_system(question.messages)
        return shown(messages) + (_TOOLS.format(json.dumps(self.tools, ensure_ascii=False)) if self.tools else "")

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        """info.tools: the tools that replies may call; info.sampling: how the reply is to be sampled."""
        return self._informed(super().reset(task, args, seed), {"tools": self.tools} if self.tools else {})

    def step(self, action: str) -> Observation:
        """info.conversation is "new" where this observation does not continue the conversation before it."""
        self._news = {}
        return self._informed(super().step(action), self._news)

    def _informed(self, answer: Observation, more: dict[str, Any]) -> Observation:
        sampling = {"sampling": self._question.sampling} if self._question and self._question.sampling else {}
        return replace(answer, info={**answer.info, **more, **sampling})

    def read(self, reply: str) -> Reply:
        """Returns the reply unchanged: the environment parses it."""
        if len(reply) > self.rules.max_reply_characters:
            return super().read(reply)
        return Reply(reply) if reply.strip() else Reply(problem="the reply is empty")

    def play(self, action: str) -> Turn:
        before = self._question
        reply = assistant(until_stop(action, before.sampling.get("stop", [])), bool(before.tools))
        before.answer.set_result(reply)
        self._question = self.rollout.next()
        if self._question is not None and self.steps >= self.rules.max_steps:
            self.rollout.refuse(self._question)
            self._question = self.rollout.next()
        if self._question is not None:
            text = news(before.messages, reply, self._question.messages)
            if text is None:  # history was rewritten, or it is another conversation
                text = self._conversation(self._question)
                self._news = {"conversation": "new", "instructions": self.instructions}
                self._news |= {"tools": self.tools} if self.tools else {}
            return Turn(text)
        return self._end(self.rollout.result())

    def _end(self, output: Any) -> Turn:
        if (problem := _fault(output)) is not None:
            raise Unavailable(f"verifiers: {problem}")
        reward = real_number(output["reward"] or 0.0, "the rubric's reward")
        metrics = list((output["metrics"] or {}).items())[:_MAX_METRICS]
        found = {f"rubric_{name}": real_number(value, f"the rubric's {name}") for name, value in metrics}
        text = shown(has_replied(output.get("completion"))) or "The episode is over."
        return Turn(text, reward, True, reward >= self.success_reward, found)


_TOOLS = (
    "\n\nYou may use these tools:\n{}\n"
    'Call one with <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call> and wait for its result.'
)


def load(environment_id: str, options: dict[str, Any], args: Arguments) -> Any:
    """The environment, loaded once in this process. Raises InvalidInput if it cannot be."""
    if not _ENVIRONMENT_ID.fullmatch(environment_id):
        raise args.wrong("env_id", environment_id, "the name of an installed environment")
    module = environment_id.rpartition("/")[2].replace("-", "_")  # load_environment would import it
    if not _is_environment(module):
        check_module(module, "args.env_id")
    try:
        return _load(environment_id, json.dumps(options, sort_keys=True))
    except Exception as error:
        raise args.wrong("env_id", environment_id, f"an environment that verifiers can load ({error})") from None


def _is_environment(module: str) -> bool:
    """Tells if a package of this name is installed and requires verifiers, as every environment of its hub does."""
    try:
        required = metadata.requires(module) or []
    except metadata.PackageNotFoundError:
        return False
    return any(re.match(r"verifiers(?![\w.-])", requirement) for requirement in required)


@functools.lru_cache(maxsize=4)
def _load(environment_id: str, options: str) -> Any:
    with _signals_restored():
        return require("verifiers", "verifiers").load_environment(environment_id, **json.loads(options))


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Environments take SIGINT and SIGTERM for themselves, which are the worker's."""
    kept = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in kept:
            signal.signal(number, handler)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process, in which environments keep clients and locks."""
    return asyncio.new_event_loop()


def _client(environment: Any, policy: Any) -> Any:
    """The client as the installed verifiers takes it: OpenAI's own, or since 0.1.11 wrapped."""
    clients = getattr(require("verifiers", "verifiers"), "clients", None)
    if clients is None:
        return policy
    chat = environment.message_type == "chat"
    return (clients.OpenAIChatCompletionsClient if chat else clients.OpenAICompletionsClient)(policy)


def read_row(environment: Any, task: Arguments, split: str) -> dict[str, Any]:
    """The row as the environment's own dataset has it. Raises InvalidInput."""
    if "question" not in task and "prompt" not in task:
        dataset = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
        if "index" not in task:
            raise task.wrong("index", None, f"from 0 to {len(dataset) - 1}, unless the row has a question or a prompt")
        return dict(dataset[task.integer("index", 0, low=0, high=len(dataset) - 1)])
    prompt = task.get("prompt", None)
    if prompt is None:
        prompt = [*(environment.few_shot or []), {"role": "user", "content": task.text("question")}]
        prompt = task.text("question") if environment.message_type != "chat" else prompt
    elif isinstance(prompt, str) and environment.message_type == "chat":
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and environment.system_prompt and prompt[:1] and prompt[0].get("role") != "system":
        prompt = [{"role": "system", "content": environment.system_prompt}, *prompt]
    row = {"prompt": prompt, "answer": task.get("answer", ""), "info": task.mapping("info"), "example_id": 0}
    return row | ({"task": task.text("task")} if "task" in task else {})


def _tool(entry: dict[str, Any]) -> dict[str, Any]:
    function = entry.get("function", entry)
    return {name: function.get(name) for name in ("name", "description", "parameters")}


def _fault(output: Any) -> str | None:
    """The error that a rollout ended with, unless the policy's use of tools was the cause: that is scored."""
    error = output.get("error")
    if error is None:
        return None
    kind = getattr(require("verifiers", "verifiers"), str(error["error"]), None)
    if isinstance(kind, type) and issubclass(kind, require("verifiers", "verifiers").ToolError):
        return None
    return str(error["error_chain_repr"])[:500]
