"""The base class of workflows. A workflow turns a task into the group's experiences.

A workflow gets completions and scores from the toolbox and never sees an engine, a stream or a message. It raises if it
cannot finish: a failed attempt is a fact with a cause, never a zero reward.
"""

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextvars import Context
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from trinity.config.hints import problems_in
from trinity.config.schema.base import Arguments
from trinity.data.experience import Experience, SamplingParams, Task
from trinity.data.images import PlacedImage
from trinity.data.prompts import prompt_text
from trinity.explorer.chat import Message
from trinity.explorer.environments.client import EnvironmentFailed
from trinity.explorer.types import Completion, EngineFailed, Taught
from trinity.explorer.workflows.seeds import numbered
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Response, Score

Result = TypeVar("Result")
A = TypeVar("A", bound=Arguments)


class Toolbox(Protocol):
    """The part of the explorer that workflows may use."""

    max_prompt_tokens: int
    max_model_tokens: int
    model_path: str

    @property
    def history_problem(self) -> str:
        """Why a conversation cannot grow by tokens under this chat template; empty if it can."""

    def prompt(
        self,
        messages: Sequence[Message],
        reply_prefix: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        images: Sequence[bytes] = (),
    ) -> list[int]:
        """Token ids of a conversation under the chat template. `tools`: JSON schemas of functions.

        `images`: files for the parts {"type": "image"}, in order.
        """

    def next_turn(self, messages: Sequence[Message], images: Sequence[bytes] = ()) -> list[int]:
        """Token ids between a reply and the next one, with new messages. The first id ends the reply's turn.

        `images`: as in `prompt`.
        """

    def placed(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[PlacedImage, ...]:
        """The images with their positions in token ids of `prompt` or `next_turn`."""

    def observed(self, text: str) -> str:
        """An environment's text, without the token that stands for an image."""

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text, without a chat template."""

    def text(self, token_ids: "Sequence[int] | np.ndarray") -> str:
        """Text of token ids, without special tokens."""

    def reply(self, token_ids: "Sequence[int] | np.ndarray") -> str:
        """Text of a sampled reply, with the begin that the chat template wrote before sampling (`<think>`)."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> list[Completion]:
        """Sample `sampling.n` completions. `images`: all images in the prompt."""

    async def older(self, key: str) -> "tuple[int, Toolbox]":
        """An older version of the policy, the same for equal keys, and a toolbox that samples from it."""

    async def policy_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 [L - 1]: the policy's log-probabilities of each token after the first, at temperature 1."""

    def openai_client(self, task: Task) -> Any:
        """An agent's session, as an asynchronous context. See trinity.explorer.sessions.agents.AgentSession."""

    async def outside_agent(self, task: Task, agent: Any) -> float | Sequence[float]:
        """Wait until an outside program has played a session. Returns its reward, or a reward for each branch."""

    async def recorded_call(self, call_id: str, reward: float) -> Experience:
        """A plain call of the endpoint, with its reward. Raises NotFound if it expired or was deleted."""

    @property
    def judges(self) -> list[str]:
        """Names of the auxiliary models that write text, in the YAML's order."""

    async def judge(self, messages: Sequence[Message], sampling: SamplingParams, model: str = "") -> list[str]:
        """`sampling.n` replies of a judge model; empty name: the first one."""

    def judge_step(self, model: str = "") -> int | None:
        """The step of the checkpoint that a judge samples from; None if its weights stay."""

    async def rate(self, conversations: Sequence[Sequence[Message]], model: str = "") -> list[float]:
        """A reward model's output for each whole conversation; empty name: the first one."""

    async def teach(self, token_ids: Sequence[int], prompt_length: int, model: str = "") -> Taught:
        """An auxiliary model's log-probabilities of the tokens after the prompt, at temperature 1.

        With them come the likeliest tokens in each place, as many as the algorithm's loss reads. The model `policy` is
        the policy itself, by its newest weights.
        """

    def episode(self, environment: str, task: dict[str, Any], args: dict[str, Any], seed: int) -> Any:
        """An episode of the environment service, as an asynchronous context.

        Its reset() and step(text) give observation, reward, done, info and metrics. Raises EnvironmentFailed.
        """

    def journal(self) -> Any:
        """The EpisodeJournal of this rollout's next episode (trinity.explorer.journal.journal); None if none is kept.

        Call this before the episode begins, so that another attempt at the task finds the same journal.
        """

    async def until_served(self, failure: EnvironmentFailed) -> None:
        """Wait until the provider is back that this failure reported as AWAY."""

    async def score(
        self, scorer: str, answers: Sequence[Response], task: dict[str, Any], args: dict[str, Any]
    ) -> list[Score]:
        """Score each answer."""


class Workflow(ABC):
    """One attempt at one task."""

    def __init__(self, task: Task, tools: Toolbox) -> None:
        self.task = task
        self.tools = tools
        self.row = task.raw
        self.format = task.format

    @abstractmethod
    async def run(self) -> list[Experience]:
        """Return all experiences of the group, from `task.repeat_times` rollouts."""

    def column(self, key: str) -> str:
        """The row's text column named by `format[key]`. A prompt that is a list of messages gives their contents.

        Raises InvalidInput naming the column.
        """
        name = self.format[key]
        value = self.row.get(name)
        if key == "prompt_key" and isinstance(value, list):
            try:
                return prompt_text(value)
            except ValueError as error:
                raise InvalidInput(f"task.{name}", str(error)) from None
        return self.cell(name)

    def cell(self, name: str) -> str:
        """The row's text or number in this column. Raises InvalidInput naming the column."""
        value = self.row.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return json.dumps(value)
        if not isinstance(value, str):
            raise InvalidInput(f"task.{name}", f"is {value!r}, must be text (columns: {', '.join(self.row)})")
        return value


def arguments(kind: type[A], given: dict[str, Any]) -> A:
    """Reads workflow_args. Raises InvalidInput naming a wrong one."""
    for name, problem in problems_in(given, kind):
        raise InvalidInput(f"workflow_args.{name}", problem)
    return kind.model_validate(given)


def as_text(tools: Toolbox, experience: Experience, metrics: dict[str, float], info_json: str = "") -> Experience:
    """Add the texts of its tokens, and metrics, to an agent's experience."""
    prompt, response = np.split(experience.token_ids, [experience.prompt_length])
    return replace(
        experience,
        metrics={**experience.metrics, **metrics},
        info_json=info_json,
        prompt_text=tools.text(prompt),
        response_text=tools.reply(response),
    )


async def contained(rollout: Coroutine[Any, Any, Result]) -> Result:
    """Run a rollout. What its own code raises to end a process or a task becomes a RuntimeError: SystemExit would end
    the explorer, and CancelledError would look like the end of the task's lease.
    """
    try:
        return await rollout
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # from outside
            raise
        raise RuntimeError("the workflow cancelled itself: it awaited a task that it had cancelled") from error


class _Rollouts(asyncio.TaskGroup):
    """Contains each task, because a task that raises SystemExit ends the event loop."""

    def create_task(  # type: ignore[override]  # no generators
        self, coro: Coroutine[Any, Any, Result], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Result]:
        return super().create_task(contained(coro), name=name, context=context)


@contextlib.asynccontextmanager
async def rollouts_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks that play rollouts. The first failure cancels the others and is raised unchanged.

    A group is stored whole or not at all: without its failed rollouts the baseline of the others would be biased.
    EngineFailed takes precedence over other failures.
    """
    try:
        async with _Rollouts() as group:
            yield group
    except BaseExceptionGroup as failures:
        found = list(_leaves(failures))
        raise next((error for error in found if isinstance(error, EngineFailed)), found[0]) from None


async def gather_rollouts(rollouts: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run rollouts as a `rollouts_group` and return their results in order."""
    async with rollouts_group() as group:
        tasks = [group.create_task(numbered(index, rollout)) for index, rollout in enumerate(rollouts)]
    return [task.result() for task in tasks]


def _leaves(group: BaseExceptionGroup[Any]) -> Iterable[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
