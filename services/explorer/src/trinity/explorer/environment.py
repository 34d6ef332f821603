"""The environment service as the workflows see it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.runtime import rpc
from trinity.runtime.errors import TrinityError

_SCORE_SECONDS = 60.0


class ScorerFailed(TrinityError):
    """An answer could not be scored. Never a zero reward."""


class EnvironmentFailed(TrinityError):
    """The environment service does not answer, or refuses."""


@dataclass(frozen=True)
class Answer:
    """One finished answer to score."""

    prompt: str
    response: str
    truth: str
    truncated: bool
    response_tokens: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Score:
    reward: float
    metrics: dict[str, float]


class EnvironmentClient:
    """One connection, for all workflows of the process."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = rpc.channel(address)
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def score(
        self, scorer: str, answers: Sequence[Answer], task: dict[str, Any], args: dict[str, Any]
    ) -> list[Score]:
        """A score for each answer. Raises ScorerFailed for the first that could not be scored."""
        task_json = json.dumps(task)
        items = [
            pb.ScoreItem(
                prompt=answer.prompt,
                response=answer.response,
                truth=answer.truth,
                task_json=task_json,
                truncated=answer.truncated,
                response_tokens=answer.response_tokens,
                response_token_ids=answer.token_ids,
            )
            for answer in answers
        ]
        request = pb.ScoreRequest(scorer=scorer, items=items, args_json=json.dumps(args))
        try:
            response = await self._stub.Score(
                request, timeout=_SCORE_SECONDS, wait_for_ready=True, metadata=rpc.metadata()
            )
        except grpc.aio.AioRpcError as error:
            raise EnvironmentFailed(f"{self.address} Score: {error.code().name}: {error.details()}") from None
        for item in response.scores:
            if item.error:
                raise ScorerFailed(f"{scorer}: {item.error}")
        return [Score(item.reward, dict(item.metrics)) for item in response.scores]
