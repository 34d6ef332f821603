"""Requests of the supervisor to services: tasks of an explorer, and a trial of a provider."""

import json
from collections.abc import Sequence
from typing import Any

import grpc.aio

from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from trinity.data.experience import Task
from trinity.data.wire import task_to_proto
from trinity.reading.errors import RunError
from trinity.reading.render import visible
from trinity.runtime import rpc
from trinity.runtime.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    PermissionDenied,
    TrinityError,
    Unauthenticated,
    Unavailable,
    error_of,
)
from trinity.runtime.trust.identity import Identity
from trinity.sdk.contract import Reset, Response, ScoreRequest, score_problem
from trinity.sdk.provider.client import Broken, Provider, Refused, Stream

_LONGEST_REFUSAL = 500  # characters
_DESCRIBE_SECONDS, _SCORE_SECONDS = 5.0, 60.0


async def publish_joined(
    address: str, run: str, name: str, weight: float, first: int, tasks: Sequence[Task], seconds: float
) -> int:
    """Offers tasks of an explorer's taskset to a run's buffer for `seconds`.

    Returns the position after the fed tasks. Raises Unavailable if the buffer cannot be reached, RunError if it refuses
    the taskset.
    """
    joined = buffer_pb2.JoinedTaskset(name=name, weight=weight, first_position=first)
    request = buffer_pb2.PublishTasksRequest(run=run, tasks=map(task_to_proto, tasks), joined=joined)
    async with rpc.channel(address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        try:
            answer = await rpc.ask(stub.PublishTasks, request, seconds=seconds)
        except (Conflict, InvalidInput, PermissionDenied, Unauthenticated) as error:
            raise RunError(visible(str(error))[:_LONGEST_REFUSAL], code=2) from None
        except TrinityError as error:
            raise Unavailable(str(error)) from None
        return int(answer.position)


async def try_provider(
    address: str, name: str, row: dict[str, Any], args: dict[str, Any], identity: Identity | None
) -> tuple[Exception | None, bool]:
    """Begins an episode of a dataset's row, or has an empty reply to it scored.

    Returns the error, if any, and whether the provider announces images.
    """
    shows = False
    async with rpc.channel(address, identity=identity) as channel:
        provider = Provider(channel)
        task, given = json.dumps(row), json.dumps(args)
        try:
            offer = await provider.describe(_DESCRIBE_SECONDS)
            if described := next((one for one in offer.environments if one.name == name), None):
                shows = described.images
                async with Stream(provider, described) as stream:
                    await stream.reset(Reset(name, task, given, images=shows))
                return None, shows
            if name not in offer.scorers:
                known = ", ".join(sorted([*(one.name for one in offer.environments), *offer.scorers])) or "nothing"
                return NotFound(f"it offers {known}"), shows
            scores = await provider.score(ScoreRequest(name, [Response(task_json=task)], given), _SCORE_SECONDS)
            problem = score_problem(1, scores) or scores[0].error
            return (TrinityError(problem) if problem else None), shows
        except Broken as error:
            return error, shows
        except Refused as error:  # an attached provider writes its name in front
            return error_of(error.code, error.details.removeprefix(f"{name}: ")), shows
        except grpc.aio.AioRpcError as error:
            return error_of(error.code(), str(error.details()).removeprefix(f"{name}: ")), shows
