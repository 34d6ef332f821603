"""The gRPC edge of the environment service: a provider like any other, to which others may attach."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.environment.attached import Attachment
from trinity.environment.hub import Hub
from trinity.runtime.errors import InvalidInput
from trinity.runtime.messages import to_message
from trinity.sdk import wire
from trinity.sdk.arena import Arena
from trinity.sdk.contract import PROTOCOL_VERSION
from trinity.sdk.servicer import IDLE_SECONDS, ProviderServicer

_OFFER_SECONDS = 20.0


class EnvironmentServicer(ProviderServicer):
    def __init__(self, arena: Arena, hub: Hub, idle_seconds: float = IDLE_SECONDS) -> None:
        super().__init__(arena, idle_seconds)
        self._hub = hub

    @contextlib.asynccontextmanager
    async def edge(self, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """The host's interceptor turns errors into statuses."""
        yield

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        answer = await super().Describe(request, context)
        answer.providers.extend(_attached(one) for one in self._hub.attachments.values())
        away = self._hub.away.values()
        answer.providers.extend(to_message(one, pb.AttachedProvider, health=pb.PROVIDER_HEALTH_AWAY) for one in away)
        return answer

    async def Attach(
        self, requests: AsyncIterator[pb.AttachRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.AttachResponse]:
        stream = aiter(requests)
        try:
            first = await asyncio.wait_for(anext(stream, None), _OFFER_SECONDS)
        except TimeoutError:
            raise InvalidInput("offer", f"did not come in {_OFFER_SECONDS:g} s") from None
        if first is None or not first.HasField("offer"):
            raise InvalidInput("offer", "is missing; it must be the first message")
        attachment = await self._hub.admit(wire.offer_from_proto(first.offer))
        reading = asyncio.create_task(_read(stream, attachment))
        try:
            yield pb.AttachResponse(accepted=pb.Accepted(protocol_version=PROTOCOL_VERSION))
            while batches := await attachment.outbox.batches():
                for batch in batches:
                    yield pb.AttachResponse(calls=batch)
            if attachment.refusal is not None:
                raise attachment.refusal
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            self._hub.remove(attachment, f"the attached provider {attachment.provider} went away")


def _attached(one: Attachment) -> pb.AttachedProvider:
    since, reason = one.failing or (one.since, "")
    return pb.AttachedProvider(
        provider=one.provider,
        health=pb.PROVIDER_HEALTH_FAILING if one.failing else pb.PROVIDER_HEALTH_SERVING,
        since_seconds=since,
        reason=reason,
        environments=sorted(one.environments),
        scorers=sorted(one.scorers),
        open=one.open.total(),
    )


async def _read(stream: AsyncIterator[pb.AttachRequest], attachment: Attachment) -> None:
    """Deliver replies until the stream ends; then the sending side ends as well."""
    try:
        async for request in stream:
            if request.HasField("offer"):
                raise InvalidInput("offer", "came twice")
            for reply in request.replies:
                attachment.receive(wire.reply_from_proto(reply))
                if attachment.ended:  # a message has room for millions
                    return
    finally:
        attachment.end(f"the attached provider {attachment.provider} went away")
