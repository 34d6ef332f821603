"""Environments of Prime Intellect's verifiers.

Their rollout loop runs as it is, with its own set-up, stop conditions, clean-up and rewards. The model it drives is an
AskedPolicy, so that each time it asks for a completion is one turn of the episode. verifiers has two interfaces: the
bridge plays the classic one below 0.4 (verifiers_classic.py), and v1 from 0.4 on (verifiers_v1.py).
"""

import asyncio
import functools
import json
import re
from dataclasses import replace
from importlib import metadata
from typing import Any

from trinity.api.numbers import real_number
from trinity.environments.allowed import check_module
from trinity.environments.arguments import Arguments
from trinity.environments.bridges import verifiers_classic, verifiers_v1
from trinity.environments.bridges.messages import assistant, news, shown, split_system, until_stop
from trinity.environments.extras import needs, require
from trinity.environments.game import TextGame, Turn, TurnRules
from trinity.environments.replies import Reply
from trinity.runtime.errors import Unavailable
from trinity.sdk.environment import Description, Observation

_ENVIRONMENT_ID = re.compile(r"(?:[\w.-]{1,100}/)?[A-Za-z][\w-]{0,99}(?:\.[A-Za-z]\w{0,99}){0,9}", re.ASCII)
_MAX_METRICS = 80


@needs("verifiers", "verifiers", "verifiers")
class Verifiers(TextGame):
    """A rollout of an installed verifiers environment. Reward: its own, at the end.

    Arguments: `env_id` (the name of an installed package which requires verifiers, or a module that the operator
    allows), `env_args` (arguments of load_environment; from verifiers 0.4 on the fields of the taskset's config),
    `success_reward` (1), and below 0.4 `split` (train) of the environment's dataset. A row is {"index"} in that dataset
    or taskset. Below 0.4 it may be a row of the dataset's kind: {"question" or "prompt", "answer", "info", "task"}.
    Replies are taken as they are; where the environment has tools, a reply calls them with
    <tool_call>{"name", "arguments"}</tool_call>. A conversation that reaches `max_steps` is ended and scored like one
    too long for the model. Metrics: rewards by name and the environment's metrics, after `rubric_`.
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

        policy = AskedPolicy()
        self.success_reward = args.number("success_reward", 1.0)
        self._interface: Any = verifiers_v1 if is_v1() else verifiers_classic
        rollout = self._interface.rollout(_module(args), task, args, policy)
        self.rollout = Asking(_loop(), policy, rollout)
        self.held.callback(self.rollout.end)
        self._question: Any = self.rollout.next()
        if self._question is None:
            raise Unavailable(f"verifiers: the rollout was over before it began: {self._interface.why(self._result())}")
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
        return self._end(self._result())

    def _result(self) -> Any:
        """Returns the rollout's result. Raises Unavailable for an error of the environment."""
        output = self.rollout.result()
        if problem := self._interface.fault(output):
            raise Unavailable(f"verifiers: {problem[:500]}")
        return output

    def _end(self, output: Any) -> Turn:
        reward = real_number(self._interface.reward(output), "the environment's reward")
        metrics = list(self._interface.metrics(output).items())[:_MAX_METRICS]
        found = {f"rubric_{name}": real_number(value, f"the environment's {name}") for name, value in metrics}
        text = self._interface.last_words(output) or "The episode is over."
        return Turn(text, reward, True, reward >= self.success_reward, found)


_TOOLS = (
    "\n\nYou may use these tools:\n{}\n"
    'Call one with <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call> and wait for its result.'
)


def is_v1() -> bool:
    """Tells if the installed verifiers is 0.4 or newer, which dropped the classic interface."""
    return tuple(int(part) for part in metadata.version("verifiers").split(".")[:2]) >= (0, 4)


def _module(args: Arguments) -> str:
    """Returns the module of `env_id`, which may be imported. Raises InvalidInput for other names."""
    environment_id = args.text("env_id")
    if not _ENVIRONMENT_ID.fullmatch(environment_id):
        raise args.wrong("env_id", environment_id, "the name of an installed environment")
    module = environment_id.rpartition("/")[2].replace("-", "_")
    if not _is_environment(module):
        check_module(module, "args.env_id")
    return module


def _is_environment(module: str) -> bool:
    """Tells if a package of this name is installed and requires verifiers, as every environment of its hub does."""
    try:
        required = metadata.requires(module) or []
    except metadata.PackageNotFoundError:
        return False
    return any(re.match(r"verifiers(?![\w.-])", requirement) for requirement in required)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process, in which environments keep clients and locks."""
    return asyncio.new_event_loop()


def _tool(entry: dict[str, Any]) -> dict[str, Any]:
    function = entry.get("function", entry)
    return {name: function.get(name) for name in ("name", "description", "parameters")}
