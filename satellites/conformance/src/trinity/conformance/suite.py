"""Checks of a whole provider and of its scorers. episodes.py has the checks of one environment."""

from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio

from trinity.conformance.episodes import EpisodeChecks, Sample
from trinity.conformance.result import Result, Verdict, judge, refused
from trinity.sdk.contract import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Reset,
    Response,
    Score,
    ScoreRequest,
    description_problem,
    score_problem,
)
from trinity.sdk.environment import Description
from trinity.sdk.provider.client import Broken, Described, Provider, Stream

_CALL_SECONDS = 10.0
_SCORE_SECONDS = 60.0
_RESPONSES = ("", "42", "<answer>42</answer>", "\\boxed{", "9**9**9**9", "\x00\x1b[31m\u202e", "٤٢ ④②", "x" * 100_000)
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # a web proxy of the shell reaches no service of a run
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


async def check_provider(
    address: str, sample: Sample, only: str = "", channel: grpc.aio.Channel | None = None
) -> AsyncIterator[Result]:
    """Yields each check's result. `only`: name of a single environment or scorer.

    `channel`: to a provider that requires an identity; by default one to the address, without an identity.
    """
    async with channel or grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        provider, answer = Provider(channel), Described([], [], 0)

        async def describe() -> None:
            nonlocal answer
            answer = await _described(provider)

        yield (first := await judge("provider", "Describe answers", describe()))
        if first.verdict is not Verdict.OK:
            return
        yield await judge("provider", "Describe is sound", _sound(answer, only))
        yield await judge("provider", "an unknown environment is NOT_FOUND", _unknown_environment(provider))
        yield await judge("provider", "an action before reset is INVALID_ARGUMENT", _action_first(provider))
        for described in answer.environments:
            if only in ("", described.name) and not description_problem(described):
                async for result in EpisodeChecks(provider, described, sample).run():
                    yield result
        yield await judge("provider", "an unknown scorer is NOT_FOUND", _unknown_scorer(provider))
        for scorer in answer.scorers:
            if only in ("", scorer):
                yield await judge(scorer, "scores are in order, finite or errors", _check_scorer(provider, scorer))
        yield await judge("provider", "Describe answers after all that", describe())


async def _described(provider: Provider) -> Described:
    try:
        return await provider.describe(_CALL_SECONDS, waits=True)
    except grpc.aio.AioRpcError as error:
        told = str(error.details())
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            told = f"no answer in {_CALL_SECONDS:.0f} s; start the provider, or give the address at which it listens"
        raise Broken(f"{error.code().name}: {told}") from None


async def _sound(answer: Described, only: str) -> None:
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


async def _unknown_environment(provider: Provider) -> None:
    async with Stream(provider, _any()) as stream:
        await refused(stream.reset(Reset(environment="no/such/environment")), grpc.StatusCode.NOT_FOUND)


async def _action_first(provider: Provider) -> None:
    async with Stream(provider, _any()) as stream:
        await refused(stream.act("look", 1), grpc.StatusCode.INVALID_ARGUMENT)


def _any() -> Description:
    return Description("", step_timeout_seconds=_CALL_SECONDS, reset_timeout_seconds=_CALL_SECONDS)


async def _check_scorer(provider: Provider, scorer: str) -> None:
    """Raises Broken unless each item gets one finite score or an error, equal for equal items."""
    items = [Response("6 x 7?", response, "42", "{}") for response in _RESPONSES]
    items.append(Response(response="42", truth="42", task_json="no JSON"))
    request = ScoreRequest(scorer, items)
    first, second = await _score(provider, request), await _score(provider, request)
    if [score.reward for score in first] != [score.reward for score in second]:
        raise Broken("the same items got other scores the second time; a scorer is a pure function")
    await _score(provider, ScoreRequest(scorer))


async def _unknown_scorer(provider: Provider) -> None:
    try:
        await provider.score(ScoreRequest("no/such/scorer"), _SCORE_SECONDS)
    except grpc.aio.AioRpcError as error:
        # Providers without scorers need not implement the method.
        if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
            raise Broken(f"it was refused with {error.code().name}: {error.details()}; must be NOT_FOUND") from None
        return
    raise Broken("it was answered; must be refused with NOT_FOUND")


async def _score(provider: Provider, request: ScoreRequest) -> Sequence[Score]:
    try:
        scores = await provider.score(request, _SCORE_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise Broken(f"{len(request.items)} items: {error.code().name}: {error.details()}") from None
    if problem := score_problem(len(request.items), scores):
        raise Broken(problem)
    return scores
