"""The current state of a run, from its services, and whether a provider plays what a YAML gives it."""

import json
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from trinity.data.experience import Task
from trinity.data.wire import task_to_proto
from trinity.reading.errors import RunError
from trinity.reading.render import visible
from trinity.runtime import rpc
from trinity.runtime.errors import Conflict, InvalidInput, NotFound, TimedOut, TrinityError, Unavailable
from trinity.runtime.trust.identity import Identity
from trinity.sdk.conformance.client import Provider, Refused, Stream
from trinity.sdk.conformance.result import Broken
from trinity.sdk.contract import Reset, Response, ScoreRequest, score_problem

_SHOWN_ERROR, _LONGEST_REFUSAL = 200, 500  # characters
_DESCRIBE_SECONDS, _SCORE_SECONDS = 5.0, 60.0


async def publish_joined(
    address: str, run: str, name: str, weight: float, first: int, tasks: Sequence[Task], seconds: float
) -> int:
    """Offer tasks of an explorer's own taskset to a run's buffer for `seconds`; the position after those that it fed.

    Unavailable if the buffer cannot be reached; RunError if it refuses the taskset.
    """
    joined = buffer_pb2.JoinedTaskset(name=name, weight=weight, first_position=first)
    request = buffer_pb2.PublishTasksRequest(run=run, tasks=map(task_to_proto, tasks), joined=joined)
    async with rpc.channel(address) as channel:
        try:
            answer = await buffer_pb2_grpc.BufferServiceStub(channel).PublishTasks(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            refused = (
                grpc.StatusCode.FAILED_PRECONDITION,
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.UNAUTHENTICATED,
            )
            if error.code() in refused:
                raise RunError(visible(str(error.details()))[:_LONGEST_REFUSAL], code=2) from None
            raise Unavailable(str(error.details())) from None
        return int(answer.position)


async def try_provider(
    address: str, name: str, row: dict[str, Any], args: dict[str, Any], identity: Identity | None
) -> tuple[Exception | None, bool]:
    """Begin an episode of a dataset's row, or have an empty reply to it scored: what went wrong, or None; and whether
    it announces images."""
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
        except (Refused, Broken) as error:
            return (_error_of(name, error.code, error.details) if isinstance(error, Refused) else error), shows
        except grpc.aio.AioRpcError as error:
            return _error_of(name, error.code(), str(error.details())), shows


def _error_of(name: str, code: grpc.StatusCode, details: str) -> Exception:
    """The exception that a status stands for; of INVALID_ARGUMENT the field is what stands before the colon."""
    details = details.removeprefix(f"{name}: ")  # of an attached provider
    field, colon, problem = details.partition(": ")
    if code is grpc.StatusCode.INVALID_ARGUMENT and colon:
        return InvalidInput(field, problem)
    kinds = (Conflict, NotFound, TimedOut, Unavailable)
    return next((kind(details) for kind in kinds if kind.code is code), TrinityError(f"{code.name}: {details}"))
