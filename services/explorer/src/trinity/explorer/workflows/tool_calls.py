"""Questions that the policy answers with tools: functions of plugins, or of an environment that offers some (MCP)."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from trinity import plugins
from trinity.config.workflows import ToolArguments
from trinity.data.experience import Experience
from trinity.explorer.chat import Message
from trinity.explorer.workflows.base import arguments, gather_rollouts
from trinity.explorer.workflows.conversation import Conversation
from trinity.explorer.workflows.player import seed_of, starts_conversation
from trinity.explorer.workflows.single_turn import SimpleWorkflow
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import sendable

_MAX_CALLS = 8  # of one turn
_MAX_RESULT = 8_000  # characters
_THREADS = 32  # of one tool

# A thread cannot be killed. Hanging calls keep the threads of their own tool, but not those of other tools or of the
# explorer.
_threads: dict[str, ThreadPoolExecutor] = {}


@dataclass(frozen=True)
class Call:
    """A call in a reply. A call with a `problem` is not made."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


class ToolSource(Protocol):
    """`schemas`: JSON schemas in the form chat templates take: {type: function, function: {name, ...}}."""

    schemas: list[dict[str, Any]]

    async def call(self, call: Call) -> tuple[str, bool]:
        """The result as text, or an error for the policy to read, and whether the call succeeded."""


class PluginTools:
    """Functions that plugins registered, called with a time limit in the threads of their tool."""

    def __init__(self, names: Sequence[str], timeout_seconds: float) -> None:
        self.schemas = [plugins.TOOLS[name].schema for name in names]
        self._names, self._timeout = set(names), timeout_seconds

    async def call(self, call: Call) -> tuple[str, bool]:
        if call.name not in self._names:
            return f"Error: there is no tool {call.name!r}", False
        try:
            async with asyncio.timeout(self._timeout):
                found = await _in_thread(call)
        except TimeoutError:
            return f"Error: {call.name} took longer than {self._timeout:g} s", False
        except (Exception, SystemExit) as error:  # a plugin's function may raise anything
            return f"Error: {type(error).__name__}: {error}", False
        return found if isinstance(found, str) else json.dumps(found, default=str), True


async def _in_thread(call: Call) -> Any:
    threads = _threads.get(call.name)
    if threads is None:
        threads = _threads[call.name] = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"tool-{call.name}")
    made = partial(copy_context().run, plugins.TOOLS[call.name].function, **call.arguments)
    return await asyncio.get_running_loop().run_in_executor(threads, made)


class EnvironmentTools:
    """Tools of an environment, which its reset lists in info.tools; a step with a <tool_call> makes a call."""

    def __init__(self, episode: Any, listed: Any) -> None:
        self._episode = episode
        entries = listed if isinstance(listed, list) else []
        self.schemas = [_schema(entry) for entry in entries if isinstance(entry, dict) and entry.get("name")]
        if not self.schemas:
            raise InvalidInput("workflow_args.environment", "names an environment that offers no tools (info.tools)")
        self._errors = 0.0
        self._over = False

    async def call(self, call: Call) -> tuple[str, bool]:
        if self._over:
            return "Error: the tools are closed", False
        text = json.dumps({"name": call.name, "arguments": call.arguments})
        step = await self._episode.step(f"<tool_call>{text}</tool_call>")
        self._over = step.done
        _refuse_images(step)
        if starts_conversation(step.info):
            raise InvalidInput(
                "workflow_args.environment", "names an environment that begins a new conversation in its episode"
            )
        before, self._errors = self._errors, step.metrics.get("tool_errors", 0.0)
        found = step.observation.strip().removeprefix("<tool_response>").removesuffix("</tool_response>")
        return found.strip(), not step.info.get("problem") and self._errors <= before


def _refuse_images(step: Any) -> None:
    if step.images:
        raise InvalidInput(
            "workflow_args.environment", "names an environment that shows images; results of tools are text"
        )


def _schema(entry: dict[str, Any]) -> dict[str, Any]:
    parameters = entry.get("parameters") or entry.get("input_schema") or entry.get("inputSchema")
    function = {"name": entry["name"], "description": entry.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": parameters or {"type": "object"}}}


def read_calls(reply: str) -> list[Call]:
    """Calls in a reply, each {"name", "arguments"} in <tool_call>...</tool_call>. Takes time linear in its length."""
    calls = []
    for part in reply.split("<tool_call>")[1 : _MAX_CALLS + 1]:
        text, closed, _ = part.partition("</tool_call>")
        calls.append(_read_call(text) if closed else Call(problem="the call has no </tool_call>"))
    return calls


def _read_call(text: str) -> Call:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"the call is not JSON: {error}")
    arguments = found.get("arguments", {}) if isinstance(found, dict) else None
    if not isinstance(arguments, dict) or not isinstance(found.get("name"), str):
        return Call(problem='a call is {"name": "...", "arguments": {...}}')
    return Call(found["name"], arguments)


@dataclass
class _Rollout:
    conversation: Conversation
    replies: list[str] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=lambda: {"tool_calls": 0.0, "tool_errors": 0.0, "bad_calls": 0.0})


class ToolCallWorkflow(SimpleWorkflow):
    """Answers calls in replies with their results, and scores the first reply without a call.

    workflow_args: tools (names of functions of plugins) or environment and environment_args; max_turns (8);
    max_response_tokens, of one turn; tool_timeout_seconds (30). One experience for each rollout.
    """

    async def run(self) -> list[Experience]:
        self._args = arguments(ToolArguments, self.task.workflow_args)
        if self.tools.history_problem:
            raise InvalidInput(
                "model.custom_chat_template", f"{self.tools.history_problem}; tool calls need it as it was"
            )
        rollouts = await gather_rollouts(self._rollout() for _ in range(self.task.repeat_times))
        asked = self.column("prompt_key")
        lasts = [(rollout.replies[-1], rollout.conversation.exchanges[-1].completion) for rollout in rollouts]
        answers = [self.answer(asked, text, c.token_ids, c.finish_reason == "length") for text, c in lasts]
        scores = await self.scores(answers)
        made = []
        for number, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
            turns = float(rollout.conversation.turns)
            metrics = {**score.metrics, **rollout.counts, "turns": turns}
            metrics["response_tokens"] = float(rollout.conversation.sampled_tokens)
            experience = rollout.conversation.experience(number, score.reward)
            said = "\n".join(rollout.replies)
            made.append(replace(experience, metrics=metrics, prompt_text=asked, response_text=said))
        return made

    async def _rollout(self) -> _Rollout:
        async with self._source() as source:
            prompt = self.tools.prompt(self.messages(), self.format["reply_prefix"], source.schemas)
            limit = min(self._args.max_response_tokens or self.task.sampling.max_tokens, self.task.sampling.max_tokens)
            if len(prompt) + limit > self.tools.max_model_tokens:
                problem = f"the prompt with its tools takes {len(prompt)} tokens, and a reply {limit}"
                raise InvalidInput("model.max_model_len", problem)
            rollout = _Rollout(Conversation(tuple(prompt)))
            sampling = replace(self.task.sampling, n=1, max_tokens=limit, min_tokens=0)
            for turn in range(self._args.max_turns):
                (completion,) = await self.tools.generate(rollout.conversation.tokens, sampling)
                rollout.conversation = rollout.conversation.replied(completion)
                rollout.replies.append(self.tools.reply(completion.token_ids))
                calls = read_calls(rollout.replies[-1])
                if not calls or turn + 1 == self._args.max_turns:
                    break
                results = [await self._result(call, source, rollout) for call in calls]
                told = rollout.conversation.told(self._told(results))
                if len(told.tokens) + limit > self.tools.max_model_tokens:
                    break
                rollout.conversation = told
            return rollout

    async def _result(self, call: Call, source: ToolSource, rollout: _Rollout) -> str:
        if call.problem:
            rollout.counts["bad_calls"] += 1
            return f"Error: {call.problem}"
        rollout.counts["tool_calls"] += 1
        text, good = await source.call(call)
        text = sendable(text)
        rollout.counts["tool_errors"] += not good
        return text if len(text) <= _MAX_RESULT else f"{text[:_MAX_RESULT]} [... cut]"

    def _told(self, results: Sequence[str]) -> list[int]:
        """Tokens of the results, as messages of the role tool, or of the user if the template has no such role."""
        try:
            return self.tools.next_turn([{"role": "tool", "content": text} for text in results])
        except InvalidInput:
            content = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in results)
            message: Message = {"role": "user", "content": content}
            return self.tools.next_turn([message])

    @asynccontextmanager
    async def _source(self) -> AsyncIterator[ToolSource]:
        if not self._args.environment:
            yield PluginTools(self._args.tools, self._args.tool_timeout_seconds)
            return
        environment, args = self._args.environment, self._args.environment_args
        async with self.tools.episode(environment, self.row, args, seed_of(self.task)) as episode:
            first = await episode.reset()
            _refuse_images(first)
            if first.player:
                what = f"is {environment!r}, a game of several players; use players_workflow"
                raise InvalidInput("workflow_args.environment", what)
            yield EnvironmentTools(episode, first.info.get("tools"))
