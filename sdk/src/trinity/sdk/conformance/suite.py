"""The checks of a whole provider and of its scorers; those of one environment are in episodes.py."""

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.sdk.conformance.episodes import EpisodeChecks, Sample
from trinity.sdk.conformance.result import Broken, Result, Verdict, judge
from trinity.sdk.conformance.stream import Stream, refused
from trinity.sdk.contract import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, description_problem, score_problem

_CALL_SECONDS = 10.0
_SCORE_SECONDS = 60.0
_RESPONSES = ("", "42", "<answer>42</answer>", "\\boxed{", "9**9**9**9", "\x00\x1b[31m\u202e", "٤٢ ④②", "x" * 100_000)
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


async def check_provider(
    address: str, sample: Sample, only: str = "", channel: grpc.aio.Channel | None = None
) -> AsyncIterator[Result]:
    """Each check's result as it is known. `only`: one environment or scorer alone. `channel`: to a provider that asks
    for an identity; else one to the address that shows none."""
    async with channel or grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        answer = pb.DescribeResponse()

        async def describe() -> None:
            answer.CopyFrom(await _described(stub))

        yield (first := await judge("provider", "Describe answers", describe()))
        if first.verdict is not Verdict.OK:
            return
        yield await judge("provider", "Describe is sound", _sound(answer, only))
        yield await judge("provider", "an unknown environment is NOT_FOUND", _unknown_environment(stub))
        yield await judge("provider", "an action before reset is INVALID_ARGUMENT", _action_first(stub))
        for described in answer.environments:
            if only in ("", described.name) and not description_problem(described):
                async for result in EpisodeChecks(stub, described, sample).run():
                    yield result
        yield await judge("provider", "an unknown scorer is NOT_FOUND", _unknown_scorer(stub))
        for scorer in answer.scorers:
            if only in ("", scorer):
                yield await judge(scorer, "scores are in order, finite or errors", _check_scorer(stub, scorer))
        yield await judge("provider", "Describe answers after all that", describe())


async def _described(stub: environment_pb2_grpc.EnvironmentServiceStub) -> pb.DescribeResponse:
    try:
        return await stub.Describe(pb.DescribeRequest(), timeout=_CALL_SECONDS, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        told = str(error.details())
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            told = f"no answer in {_CALL_SECONDS:.0f} s; start the provider, or give the address at which it listens"
        raise Broken(f"{error.code().name}: {told}") from None


async def _sound(answer: pb.DescribeResponse, only: str) -> None:
    if answer.protocol_version != PROTOCOL_VERSION:
        raise Broken(f"protocol_version: is {answer.protocol_version}, must be {PROTOCOL_VERSION}")
    for described in answer.environments:
        if problem := description_problem(described):
            raise Broken(f"{described.name[:200]}: {problem}")
    names = [described.name for described in answer.environments]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Broken(f"environments: {twice[0]!r} is there twice")
    if not names and not answer.scorers:
        raise Broken("it has neither environments nor scorers")
    if only and only not in {*names, *answer.scorers}:
        raise Broken(f"nothing is named {only!r}; known: {', '.join(sorted({*names, *answer.scorers}))}")


async def _unknown_environment(stub: environment_pb2_grpc.EnvironmentServiceStub) -> None:
    async with Stream(stub, _any()) as stream:
        await refused(stream.reset(pb.Reset(environment="no/such/environment")), grpc.StatusCode.NOT_FOUND)


async def _action_first(stub: environment_pb2_grpc.EnvironmentServiceStub) -> None:
    async with Stream(stub, _any()) as stream:
        await refused(stream.act("look", 1), grpc.StatusCode.INVALID_ARGUMENT)


def _any() -> pb.EnvironmentDescription:
    return pb.EnvironmentDescription(step_timeout_seconds=_CALL_SECONDS)


async def _check_scorer(stub: environment_pb2_grpc.EnvironmentServiceStub, scorer: str) -> None:
    """One score for each item, finite or an error, for any items, and equal for equal items."""
    items = [pb.ScoreItem(prompt="6 x 7?", response=response, truth="42", task_json="{}") for response in _RESPONSES]
    items.append(pb.ScoreItem(response="42", truth="42", task_json="no JSON"))
    request = pb.ScoreRequest(scorer=scorer, items=items)
    first, second = await _score(stub, request), await _score(stub, request)
    if [score.reward for score in first.scores] != [score.reward for score in second.scores]:
        raise Broken("the same items got other scores the second time; a scorer is a pure function")
    await _score(stub, pb.ScoreRequest(scorer=scorer))


async def _unknown_scorer(stub: environment_pb2_grpc.EnvironmentServiceStub) -> None:
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
