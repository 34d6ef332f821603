"""The gRPC edge of the environment service."""

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.environment.environment import Observation
from trinity.environment.episodes import Arena
from trinity.environment.scorers import ScoreItem, find_scorer, scorer_names
from trinity.runtime.errors import InvalidInput, NotFound

MAX_ITEMS = 4096


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        described = [
            pb.EnvironmentDescription(
                name=d.name,
                summary=d.summary,
                max_parallel_episodes=d.max_parallel_episodes,
                step_timeout_seconds=d.step_timeout_seconds,
            )
            for d in (kind.description for kind in self._arena.environments.values())
        ]
        return pb.DescribeResponse(environments=described, scorers=scorer_names())

    async def Episode(
        self, requests: AsyncIterator[pb.EpisodeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.EpisodeResponse]:
        first = await anext(aiter(requests), None)
        if first is None:
            return
        if first.WhichOneof("message") != "reset":
            raise InvalidInput("reset", "is missing; it must be the first message of an episode")
        reset = first.reset
        async with self._arena.enter(reset.environment) as episode:
            task = _object(reset.task_json, "reset.task_json")
            args = _object(reset.args_json, "reset.args_json")
            yield _response(await episode.reset(task, args, reset.seed))
            async for request in requests:
                if request.WhichOneof("message") != "action":
                    raise InvalidInput("action", "is missing; after reset every message is an action")
                yield _response(await episode.step(request.action.text))

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        scorer = find_scorer(request.scorer)
        if scorer is None:
            raise NotFound(f"scorer: none is named {request.scorer!r}; known: {', '.join(scorer_names())}")
        if len(request.items) > MAX_ITEMS:
            raise InvalidInput("items", f"has {len(request.items)} items, at most {MAX_ITEMS} in one call")
        args = _object(request.args_json, "args_json")

        def score_all() -> list[pb.Score]:
            return [_score(scorer, item, args) for item in request.items]

        return pb.ScoreResponse(scores=await self._arena.call(score_all))


def _score(scorer: Any, item: pb.ScoreItem, args: dict[str, Any]) -> pb.Score:
    try:
        result = scorer(
            ScoreItem(
                prompt=item.prompt,
                response=item.response,
                truth=item.truth,
                task=_object(item.task_json, "items.task_json"),
                truncated=item.truncated,
                response_tokens=item.response_tokens,
                token_ids=tuple(item.response_token_ids),
            ),
            args,
        )
        if not math.isfinite(result.reward):
            return pb.Score(error=f"the scorer gave {result.reward}; rewards are finite")
        return pb.Score(reward=result.reward, metrics=result.metrics)
    except (Exception, SystemExit) as error:  # a bad item is that item's own failure, never the service's end
        return pb.Score(error=f"{type(error).__name__}: {error}")


def _response(observation: Observation) -> pb.EpisodeResponse:
    return pb.EpisodeResponse(
        observation=observation.text,
        reward=observation.reward,
        done=observation.done,
        info_json=json.dumps(observation.info) if observation.info else "",
        metrics=observation.metrics,
    )


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidInput(field, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInput(field, f"must be a JSON object, is {type(value).__name__}")
    return value
