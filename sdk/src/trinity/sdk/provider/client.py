"""Calls of a provider, and episodes message by message, in or out of turn."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import grpc
import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.sdk import wire
from trinity.sdk.contract import Action, Answer, Reset, Score, ScoreRequest, answer_problem
from trinity.sdk.environment import Description

# Added to the announced time.
GRACE_SECONDS = 2.0


class Broken(Exception):
    """The contract is violated."""


class Refused(Exception):
    """The provider ended the episode with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class Described(NamedTuple):
    """A provider's announcement."""

    environments: list[Description]
    scorers: list[str]
    protocol_version: int


class Provider:
    """The provider at the other end of a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = environment_pb2_grpc.EnvironmentServiceStub(channel)

    async def describe(self, seconds: float, *, waits: bool = False) -> Described:
        """Returns the announcement. `waits` for a provider that has not started yet. Raises AioRpcError."""
        answer = await self.stub.Describe(pb.DescribeRequest(), timeout=seconds, wait_for_ready=waits)
        environments = [wire.description_of(one) for one in answer.environments]
        return Described(environments, list(answer.scorers), answer.protocol_version)

    async def score(self, request: ScoreRequest, seconds: float) -> Sequence[Score]:
        """Raises AioRpcError."""
        return wire.scores_from_proto(await self.stub.Score(wire.score_request_to_proto(request), timeout=seconds))


class Stream:
    """One episode. Use as `async with`; leaving it cancels the episode."""

    def __init__(self, provider: "Provider", described: Description) -> None:
        self._call = provider.stub.Episode()
        self._described = described
        self._step_seconds = described.step_timeout_seconds + GRACE_SECONDS
        self._reset_seconds = (described.reset_timeout_seconds or described.step_timeout_seconds) + GRACE_SECONDS

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()

    async def reset(self, reset: Reset) -> Answer:
        """Returns a sound answer. Raises Refused, and Broken for any other."""
        request = pb.EpisodeRequest(reset=wire.reset_to_proto(reset))
        return await self._exchange(request, self._reset_seconds, 0, "reset")

    async def restore(self, reset: Reset) -> Answer:
        """Resets with the state and the turn of an answer. Raises Refused, and Broken for an unsound answer."""
        request = pb.EpisodeRequest(reset=wire.reset_to_proto(reset))
        return await self._exchange(request, self._reset_seconds, reset.turn, "restore")

    async def act(self, text: str, turn: int) -> Answer:
        """Returns a sound answer. Raises Refused, and Broken for any other."""
        request = pb.EpisodeRequest(action=wire.action_to_proto(Action(text, turn)))
        return await self._exchange(request, self._step_seconds, turn, f"action {turn}")

    async def _exchange(self, request: pb.EpisodeRequest, seconds: float, turn: int, what: str) -> Answer:
        try:
            async with asyncio.timeout(seconds):
                await self._call.write(request)
                message = await self._call.read()
        except TimeoutError:
            raise Broken(f"no answer to {what} in {seconds:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise Refused(error.code(), str(error.details())) from None
        except asyncio.InvalidStateError:
            raise await self._status(what) from None
        if message is grpc.aio.EOF:
            raise await self._status(what)
        answer = wire.answer_from_proto(message)
        problem = answer_problem(answer, turn, self._described)
        if problem:
            raise Broken(f"the answer to {what} breaks the contract: {problem}")
        return answer

    async def _status(self, what: str) -> Exception:
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return Broken(f"the stream ended instead of an answer to {what}")
        return Refused(code, str(await self._call.details()))

    async def silent(self, seconds: float) -> None:
        """Raises Broken if an unsolicited message arrives. The stream is unusable afterwards."""
        try:
            async with asyncio.timeout(seconds):
                answer = await self._call.read()
        except TimeoutError:
            return
        except grpc.aio.AioRpcError as error:
            raise Broken(f"the episode ended by itself: {error.code().name}: {error.details()}") from None
        if answer is grpc.aio.EOF:
            raise Broken("the episode ended by itself")
        raise Broken("there was a second answer to one message")

    async def finish(self, seconds: float) -> None:
        """Half-closes, as clients do at the end. Raises Broken unless the provider ends with OK."""
        try:
            async with asyncio.timeout(seconds):
                await self._call.done_writing()
                answer = await self._call.read()
                code = await self._call.code()
        except TimeoutError:
            raise Broken(f"the stream was still open {seconds:g} s after the client had closed its side") from None
        except grpc.aio.AioRpcError as error:
            code, answer = error.code(), grpc.aio.EOF
        if answer is not grpc.aio.EOF:
            raise Broken("there was a second answer to one message")
        if code is not grpc.StatusCode.OK:
            raise Broken(f"the stream ended with {code.name} after the client had closed its side, must be OK")
