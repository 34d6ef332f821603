"""The checks of a whole provider; those of one environment are in episodes.py, of one scorer in scores.py."""

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.sdk.conformance.episodes import EpisodeChecks, Sample
from trinity.sdk.conformance.result import Broken, Result, Verdict, judge
from trinity.sdk.conformance.scores import check_scorer, unknown_scorer
from trinity.sdk.conformance.stream import Stream, refused
from trinity.sdk.contract import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, description_problem

_CALL_SECONDS = 10.0
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


async def check_provider(address: str, sample: Sample, only: str = "") -> AsyncIterator[Result]:
    """Each check's result as it is known. `only`: one environment or scorer alone."""
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
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
        yield await judge("provider", "an unknown scorer is NOT_FOUND", unknown_scorer(stub))
        for scorer in answer.scorers:
            if only in ("", scorer):
                yield await judge(scorer, "scores are in order, finite or errors", check_scorer(stub, scorer))
        yield await judge("provider", "Describe answers after all that", describe())


async def _described(stub: environment_pb2_grpc.EnvironmentServiceStub) -> pb.DescribeResponse:
    try:
        return await stub.Describe(pb.DescribeRequest(), timeout=_CALL_SECONDS, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        raise Broken(f"{error.code().name}: {error.details()}") from None


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
