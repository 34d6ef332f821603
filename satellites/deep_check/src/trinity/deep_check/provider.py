"""A trial of a provider, for the checks of a YAML."""

import json
from typing import Any

import grpc.aio

from trinity.runtime import rpc
from trinity.runtime.errors import NotFound, TrinityError, error_of
from trinity.runtime.trust.identity import Identity
from trinity.sdk.contract import Reset, Response, ScoreRequest, score_problem
from trinity.sdk.provider.client import Broken, Provider, Refused, Stream

_DESCRIBE_SECONDS, _SCORE_SECONDS = 5.0, 60.0


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
