"""The workflows' toolbox: this explorer's engines, tokenizer, auxiliary models and environments."""

import copy
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from trinity.config.checks.teacher import POLICY
from trinity.config.workflows import OLDER
from trinity.data.experience import Experience, SamplingParams, Task
from trinity.data.images import PlacedImage
from trinity.explorer.chat import ChatTokenizer, Message
from trinity.explorer.engine.auxiliary import AuxiliaryModels
from trinity.explorer.engine.older import OlderVersions
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.environments.client import EnvironmentClient
from trinity.explorer.journal.journal import EpisodeJournal, current_episode
from trinity.explorer.sessions.agents import AgentSession
from trinity.explorer.sessions.server import AgentGateway
from trinity.explorer.types import Completion, Taught
from trinity.explorer.workflows import seeds
from trinity.runtime import tracing
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Response, Score


class ExplorerTools:
    """Implements trinity.explorer.workflows.Toolbox."""

    def __init__(
        self,
        pool: EnginePool,
        tokenizer: ChatTokenizer,
        environment: EnvironmentClient,
        auxiliary: AuxiliaryModels,
        max_prompt_tokens: int,
        max_model_tokens: int,
        gateway: AgentGateway | None = None,
        seed: int | None = None,
        teacher_top: int = 0,
    ) -> None:
        """`seed`: of a reproducible run; each request's seed is derived from it. `teacher_top`: of the algorithm."""
        self.gateway = gateway
        self.calls: Any = None  # of trinity-traffic; set once the explorer has a run
        self.older_versions: OlderVersions | None = None
        self._version: int | None = None  # older than the served one, if another toolbox samples from it
        self._seed = seed
        self._teacher_top = teacher_top
        self._auxiliary = auxiliary
        self._pool = pool
        self._tokenizer = tokenizer
        self.model_path = tokenizer.model_path
        self.prompt, self.next_turn, self.placed = tokenizer.prompt, tokenizer.next_turn, tokenizer.placed
        self.tokens, self.text, self.reply = tokenizer.tokens, tokenizer.text, tokenizer.reply
        self.observed = tokenizer.observed
        self._environment = environment
        self.episode, self.until_served = environment.episode, environment.until_served
        self.max_prompt_tokens = max_prompt_tokens
        self.max_model_tokens = max_model_tokens

    async def check(self) -> None:
        """Raises EngineFailed if an auxiliary model's engine or the gateway of agents is gone."""
        await self._auxiliary.check()
        if self.gateway is not None:
            await self.gateway.check()

    async def close(self) -> None:
        if self.gateway is not None:
            await self.gateway.close()
        await self._environment.close()
        self._auxiliary.close()

    @property
    def history_problem(self) -> str:
        return self._tokenizer.history_problem

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> list[Completion]:
        if self._seed is not None:
            sampling = replace(sampling, seed=seeds.of_request(self._seed, prompt_token_ids))
        with tracing.span("engine.generate", prompt_tokens=len(prompt_token_ids), n=sampling.n):
            if self._version is not None and self.older_versions is not None:
                return await self.older_versions.generate(self._version, prompt_token_ids, sampling, images)
            return await self._pool.generate(prompt_token_ids, sampling, images)

    async def older(self, key: str) -> tuple[int, "ExplorerTools"]:
        if self.older_versions is None:
            raise InvalidInput("workflow_args.seats", f"has a seat {OLDER!r}, and the YAML's tasksets have none")
        made = copy.copy(self)
        made._version = version = await self.older_versions.choose(key)
        return version, made

    async def policy_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        self._check_length(token_ids)
        return await self._pool.logprobs(token_ids)

    def _check_length(self, token_ids: Sequence[int]) -> None:
        if not 2 <= len(token_ids) < self.max_model_tokens:
            raise InvalidInput("tokens", f"are {len(token_ids)}, must be 2 to {self.max_model_tokens - 1}")

    def openai_client(self, task: Task) -> AbstractAsyncContextManager[AgentSession]:
        if self.gateway is None:
            raise InvalidInput("task.workflow", "asks for an OpenAI client, and this toolbox has no gateway")
        if self._seed is not None:
            raise InvalidInput("reproducible", "is true, and requests of an agent's OpenAI client have no seed")
        return self.gateway.session(task.sampling, task.timeout_seconds)

    async def outside_agent(self, task: Task, agent: AgentSession) -> float | Sequence[float]:
        if self.gateway is None:
            raise InvalidInput("task.workflow", "asks for an agent outside, and this toolbox has no gateway")
        return await self.gateway.outside.offer(task, agent)

    async def recorded_call(self, call_id: str, reward: float) -> Experience:
        if self.calls is None:
            raise InvalidInput("task.workflow", "asks for a recorded call, which needs a run and trinity-traffic")
        return await self.calls.experience(call_id, reward)

    async def judge(self, messages: Sequence[Message], sampling: SamplingParams, model: str = "") -> list[str]:
        with tracing.span("auxiliary.judge", model=model, n=sampling.n):
            return await self._auxiliary.judge(model).chat(messages, sampling)

    def judge_step(self, model: str = "") -> int | None:
        return self._auxiliary.judge(model).step

    @property
    def judges(self) -> list[str]:
        return self._auxiliary.judges

    async def rate(self, conversations: Sequence[Sequence[Message]], model: str = "") -> list[float]:
        with tracing.span("auxiliary.rate", model=model, conversations=len(conversations)):
            return await self._auxiliary.reward_model(model).rate(conversations)

    async def teach(self, token_ids: Sequence[int], prompt_length: int, model: str = "") -> Taught:
        with tracing.span("auxiliary.logprobs", model=model, tokens=len(token_ids)):
            if model == POLICY:
                self._check_length(token_ids)
                return await self._pool.teach(token_ids, prompt_length, self._teacher_top)
            return await self._auxiliary.judge(model).teach(token_ids, prompt_length, self._teacher_top)

    def journal(self) -> EpisodeJournal | None:
        return current_episode(seeds.place())

    async def score(
        self, scorer: str, answers: Sequence[Response], task: dict[str, Any], args: dict[str, Any]
    ) -> list[Score]:
        with tracing.span("environment.score", scorer=scorer, answers=len(answers)):
            return await self._environment.score(scorer, answers, task, args)
