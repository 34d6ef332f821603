"""The checks of scoring functions."""

import grpc
import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.sdk.conformance.result import Broken
from trinity.sdk.contract import score_problem

_SCORE_SECONDS = 60.0
_RESPONSES = ("", "42", "<answer>42</answer>", "\\boxed{", "9**9**9**9", "\x00\x1b[31m\u202e", "٤٢ ④②", "x" * 100_000)


async def check_scorer(stub: environment_pb2_grpc.EnvironmentServiceStub, scorer: str) -> None:
    """One score for each item, finite or an error, for any items, and equal for equal items."""
    items = [pb.ScoreItem(prompt="6 x 7?", response=response, truth="42", task_json="{}") for response in _RESPONSES]
    items.append(pb.ScoreItem(response="42", truth="42", task_json="no JSON"))
    request = pb.ScoreRequest(scorer=scorer, items=items)
    first, second = await _score(stub, request), await _score(stub, request)
    if [score.reward for score in first.scores] != [score.reward for score in second.scores]:
        raise Broken("the same items got other scores the second time; a scorer is a pure function")
    await _score(stub, pb.ScoreRequest(scorer=scorer))


async def unknown_scorer(stub: environment_pb2_grpc.EnvironmentServiceStub) -> None:
    try:
        await stub.Score(pb.ScoreRequest(scorer="no/such/scorer"), timeout=_SCORE_SECONDS)
    except grpc.aio.AioRpcError as error:
        # Who has no scorers at all need not implement the method.
        if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
            raise Broken(f"it was refused with {error.code().name}: {error.details()}; must be NOT_FOUND") from None
        return
    raise Broken("it was answered; must be refused with NOT_FOUND")


async def _score(stub: environment_pb2_grpc.EnvironmentServiceStub, request: pb.ScoreRequest) -> pb.ScoreResponse:
    try:
        answer: pb.ScoreResponse = await stub.Score(request, timeout=_SCORE_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise Broken(f"{len(request.items)} items: {error.code().name}: {error.details()}") from None
    if problem := score_problem(request, answer):
        raise Broken(problem)
    return answer
