"""The gRPC edge of a provider: Describe, Episode, Score."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.sdk import contract, wire
from trinity.sdk.arena import Arena
from trinity.sdk.arena import Episode as PlayedEpisode
from trinity.sdk.errors import InvalidInput, TimedOut, status_of

SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", contract.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", contract.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),
    # Connections without a call hold file descriptors.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
]
# An episode ends if its client sends nothing for so long.
IDLE_SECONDS = 3600.0
# A stream ends if its reset takes longer.
RESET_SECONDS = 60.0
# Characters: a status travels in headers, which have room for 8 KiB.
LONGEST_STATUS = 4000


class ProviderServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    def __init__(self, arena: Arena, idle_seconds: float = IDLE_SECONDS) -> None:
        self._arena = arena
        self._idle_seconds = idle_seconds

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Adds the service to a server; returns its full names."""
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self, server)
        return [pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name]

    @contextlib.asynccontextmanager
    async def edge(self, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Turns errors into statuses."""
        try:
            yield
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            code, text = status_of(error)
            await context.abort(code, text[:LONGEST_STATUS])

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            environments=[wire.described(source.description) for source in self._arena.sources.values()],
            scorers=sorted(self._arena.scorers),
            protocol_version=contract.PROTOCOL_VERSION,
        )

    async def Episode(
        self, requests: AsyncIterator[pb.EpisodeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.EpisodeResponse]:
        async with self.edge(context):
            stream = aiter(requests)
            first = await self._next(stream, min(RESET_SECONDS, self._idle_seconds))
            if first is None:
                return
            if first.WhichOneof("message") != "reset":
                raise InvalidInput("reset", "is missing; it must be the first message of an episode")
            async with self._arena.enter(first.reset.environment) as episode:
                yield wire.answer_to_proto(await episode.reset(wire.reset_from_proto(first.reset)))
                async for response in self._turns(episode, stream):
                    yield response

    async def _turns(
        self, episode: PlayedEpisode, requests: AsyncIterator[pb.EpisodeRequest]
    ) -> AsyncIterator[pb.EpisodeResponse]:
        while (request := await self._next(requests, self._idle_seconds)) is not None:
            if request.WhichOneof("message") != "action":
                raise InvalidInput("action", "is missing; after reset every message is an action")
            yield wire.answer_to_proto(await episode.step(wire.action_from_proto(request.action)))

    async def _next(self, requests: AsyncIterator[pb.EpisodeRequest], seconds: float) -> pb.EpisodeRequest | None:
        try:
            async with asyncio.timeout(seconds):
                return await anext(requests, None)
        except TimeoutError:
            raise TimedOut(f"the client sent nothing for {seconds:g} s; the episode is over") from None

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        async with self.edge(context):
            return wire.scores_to_proto(await self._arena.score(wire.score_request_from_proto(request)))
        raise AssertionError  # the edge has ended the call
