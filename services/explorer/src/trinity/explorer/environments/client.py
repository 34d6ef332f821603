"""The workflows' access to environments and scorers, independent of their provider.

    async with client.episode("countdown", task_row, args, seed) as episode:
        step = await episode.reset()
        while not step.done:
            step = await episode.step(reply(step.observation))

An environment with an address in the YAML is played there. The run's environment service plays all others, and forwards
to its attached providers. Callers wait while every slot is in use (slots.py). An unfinished episode raises
EnvironmentFailed with its cause: the whole group is attempted again, and the provider is avoided for a while if another
one has the name. If all providers of a name are away, the attempt waits for them and is not used up.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc.aio

from trinity.data.vision import ImageRules
from trinity.explorer.environments.episode import Episode
from trinity.explorer.environments.providers import Backoff, Providers
from trinity.explorer.environments.types import EnvironmentCause, EnvironmentFailed, ScorerFailed
from trinity.sdk import contract
from trinity.sdk.contract import Reset, Response, Score, ScoreRequest
from trinity.sdk.wire import score_request_to_proto, scores_from_proto

_SCORE_SECONDS = 60.0
READS_NONE = "the model reads none; give one that does (model.model_path)"


class EnvironmentClient:
    """Connections to all providers, shared by the workflows of the process."""

    def __init__(
        self,
        address: str,
        addressed: Sequence[tuple[str, str]] = (),
        wait_seconds: float = 60.0,
        declared: Sequence[str] = (),
        images: ImageRules | str = READS_NONE,
        reward_bound: float = 0.0,
    ) -> None:
        """`address`: the run's environment service. `addressed`: (name of an environment or scorer, address of a
        provider); several providers of a name share its load. `declared`: names that will attach. `wait_seconds`: how
        long any other name may be unknown. A full provider is waited for until the attempt's limit. `images`: the
        model's rules for images, or the reason to refuse environments that show images. `reward_bound`: answers with
        larger rewards break the contract; 0: none."""
        self.address = address
        self._providers = Providers(address, addressed, declared)
        self._wait_seconds = wait_seconds
        self._images = images
        self._reward_bound = reward_bound
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._providers.close()

    def episode(
        self, environment: str, task: dict[str, Any], args: dict[str, Any] | None = None, seed: int = 0
    ) -> Episode:
        """An episode of a task (a dataset row), for `async with`. Sends nothing before its `reset`."""
        reset = Reset(environment, json.dumps(task), json.dumps(args) if args else "", seed)
        reset = replace(reset, reward_bound=self._reward_bound)
        return Episode(self._providers, reset, self._wait_seconds, self._closing, self._images)

    async def until_served(self, failure: EnvironmentFailed) -> None:
        """Wait without limit until a provider is back, after a failure with the cause AWAY."""
        await self._providers.until_served(failure.environment, str(failure))

    async def score(
        self, scorer: str, answers: Sequence[Response], task: dict[str, Any], args: dict[str, Any]
    ) -> list[Score]:
        """Score each answer to a task (a dataset row). Raises ScorerFailed for the first that could not be scored."""
        task_json = json.dumps(task)
        items = [replace(answer, task_json=task_json) for answer in answers]
        scores = await self._score(ScoreRequest(scorer, items, json.dumps(args), self._reward_bound))
        for score in scores:
            if score.error:
                raise ScorerFailed(f"{scorer}: {score.error}")
        return scores

    async def _score(self, request: ScoreRequest) -> list[Score]:
        backoff, message = Backoff(self._wait_seconds), score_request_to_proto(request)
        while True:
            provider = self._providers.choose(request.scorer)
            with provider.busy(request.scorer):
                try:
                    response = await provider.stub.Score(message, timeout=_SCORE_SECONDS)
                except grpc.aio.AioRpcError as error:
                    failure = await provider.failure(request.scorer, error)
                    provider.record_failure(request.scorer, failure)
                    if failure.cause is EnvironmentCause.AWAY and self._providers.is_awaited(request.scorer):
                        raise failure from None
                    await backoff.wait_or_raise(failure)
                    continue
            scores = scores_from_proto(response)
            problem = contract.score_problem(len(request.items), scores, self._reward_bound)
            if problem:
                failure = EnvironmentFailed(
                    f"{provider.address} Score {request.scorer}: {problem}", EnvironmentCause.CONTRACT_VIOLATION
                )
                provider.record_failure(request.scorer, failure)
                raise ScorerFailed(str(failure))
            provider.record_success(request.scorer)
            return scores
