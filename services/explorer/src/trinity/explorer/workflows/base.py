"""The base class of workflows. A workflow turns a task into the group's experiences.

A workflow asks the toolbox for completions and scores and never sees an engine, a stream or a message. It raises when
it cannot finish: a failed attempt is a fact with a cause, never a zero reward.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from trinity.data.experience import Experience, SamplingParams, Task
from trinity.data.images import PlacedImage
from trinity.data.prompts import prompt_text
from trinity.explorer.chat import Message
from trinity.explorer.environments.client import Answer, EnvironmentFailed, Score
from trinity.explorer.types import Completion, EngineFailed
from trinity.explorer.workflows.seeds import numbered
from trinity.runtime.errors import InvalidInput

Result = TypeVar("Result")


class Toolbox(Protocol):
    """What a workflow may use of the explorer."""

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

        `images`: files of those that its parts {"type": "image"} stand for, in order.
        """

    def next_turn(self, messages: Sequence[Message], images: Sequence[bytes] = ()) -> list[int]:
        """Token ids between a reply and the next one, with new messages; they begin with what ends a turn.

        `images`: as in `prompt`.
        """

    def placed(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[PlacedImage, ...]:
        """Where images stand in what `prompt` or `next_turn` gave with them."""

    def observed(self, text: str) -> str:
        """A text of an environment, without the token that stands for an image."""

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text, without a chat template."""

    def text(self, token_ids: "Sequence[int] | np.ndarray") -> str:
        """Token ids as text, special tokens left out."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> list[Completion]:
        """`sampling.n` completions. `images`: those among the prompt's tokens."""

    async def policy_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 [L - 1]: the policy's log-probabilities of each token after the first, at temperature 1."""

    def openai_client(self, task: Task) -> Any:
        """A session of an agent, as an asynchronous context: see trinity.explorer.sessions.agents.AgentSession."""

    async def outside_agent(self, task: Task, agent: Any) -> float | Sequence[float]:
        """Have a program outside play a session; returns its reward, or one of each branch."""

    @property
    def judges(self) -> list[str]:
        """Names of the auxiliary models that write, in the YAML's order."""

    async def judge(self, messages: Sequence[Message], sampling: SamplingParams, model: str = "") -> list[str]:
        """`sampling.n` replies of a judge model; empty name: the first one."""

    async def rate(self, conversations: Sequence[Sequence[Message]], model: str = "") -> list[float]:
        """A reward model's output for each whole conversation; empty name: the first one."""

    async def teacher_logprobs(self, token_ids: Sequence[int], prompt_length: int, model: str = "") -> np.ndarray:
        """float32 [R]: an auxiliary model's log-probabilities of the tokens after the prompt, at temperature 1."""

    def episode(self, environment: str, task: dict[str, Any], args: dict[str, Any], seed: int) -> Any:
        """An episode of the environment service, as an asynchronous context.

        Its reset() and step(text) give observation, reward, done, info and metrics. Raises EnvironmentFailed.
        """

    def journal(self) -> Any:
        """Of the next episode of this rollout: see trinity.explorer.journal.journal.EpisodeJournal. None: none is kept.

        Asked for before the episode begins, so that another attempt at the task finds the same one.
        """

    async def until_served(self, failure: EnvironmentFailed) -> None:
        """Wait until the provider that is away, as this failure said, is back."""

    async def score(
        self, scorer: str, answers: Sequence[Answer], task: dict[str, Any], args: dict[str, Any]
    ) -> list[Score]:
        """A score for each answer."""


class Workflow(ABC):
    """One attempt at one task."""

    def __init__(self, task: Task, tools: Toolbox) -> None:
        self.task = task
        self.tools = tools
        self.row = task.raw
        self.format = task.format

    @abstractmethod
    async def run(self) -> list[Experience]:
        """All experiences of the group: `task.repeat_times` rollouts."""

    def column(self, key: str) -> str:
        """A text column of the row named by `format[key]`; of a prompt that is a list of messages, their contents.

        Raises InvalidInput naming the column.
        """
        name = self.format[key]
        value = self.row.get(name)
        if key == "prompt_key" and isinstance(value, list):
            try:
                return prompt_text(value)
            except ValueError as error:
                raise InvalidInput(f"task.{name}", str(error)) from None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return json.dumps(value)
        if not isinstance(value, str):
            raise InvalidInput(f"task.{name}", f"is {value!r}, must be text (columns: {', '.join(self.row)})")
        return value


def as_text(tools: Toolbox, experience: Experience, metrics: dict[str, float], info_json: str = "") -> Experience:
    """An agent's experience with the texts of its tokens, and with further metrics."""
    prompt, response = np.split(experience.token_ids, [experience.prompt_length])
    return replace(
        experience,
        metrics={**experience.metrics, **metrics},
        info_json=info_json,
        prompt_text=tools.text(prompt),
        response_text=tools.text(response),
    )


async def gather_rollouts(rollouts: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The rollouts' results, in order. The first failure cancels the others and is raised unchanged.

    A group is stored whole or not at all: without its failed rollouts the baseline of the others would be biased.
    EngineFailed takes precedence over other failures.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(numbered(index, rollout)) for index, rollout in enumerate(rollouts)]
    except BaseExceptionGroup as failures:
        found = list(_leaves(failures))
        raise next((error for error in found if isinstance(error, EngineFailed)), found[0]) from None
    return [task.result() for task in tasks]


def _leaves(group: BaseExceptionGroup[Any]) -> Iterable[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
