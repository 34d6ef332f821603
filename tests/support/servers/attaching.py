"""An environment service of this process to which a test attaches providers, also by hand, and plays their episodes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.environment.hub import Hub
from trinity.environment.servicer import EnvironmentServicer
from trinity.environments import ENVIRONMENTS
from trinity.environments.scorers import SCORERS
from trinity.runtime import rpc
from trinity.runtime.trust.attach_tokens import AttachTokens
from trinity.sdk.arena import Arena
from trinity.sdk.contract import PROTOCOL_VERSION

TOKEN = "secret"


@dataclass
class Service:
    """An environment service of this process."""

    address: str
    arena: Arena
    hub: Hub
    stub: environment_pb2_grpc.EnvironmentServiceStub


@asynccontextmanager
async def serve(
    address: str = "127.0.0.1:0", token: str = TOKEN, tokens_file: Path | None = None
) -> AsyncIterator[Service]:
    arena = Arena(ENVIRONMENTS.values(), SCORERS)
    hub = Hub(arena, AttachTokens(token, tokens_file))
    server = grpc.aio.server(interceptors=[rpc.Edge()], options=rpc.SERVER_OPTIONS)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(EnvironmentServicer(arena, hub), server)
    address = f"127.0.0.1:{server.add_insecure_port(address)}"
    await server.start()
    following = asyncio.create_task(hub.follow_tokens())
    async with rpc.channel(address) as channel:
        yield Service(address, arena, hub, environment_pb2_grpc.EnvironmentServiceStub(channel))
    following.cancel()
    await server.stop(grace=0)
    await arena.drain(1)


async def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


class Player:
    """A client's side of one episode."""

    def __init__(self, service: Service, **task: Any) -> None:
        self.call = service.stub.Episode(timeout=60)
        self.turn = 0
        self._reset = pb.Reset(environment="odd", task_json=json.dumps(task), seed=7, reward_bound=1e6)

    async def reset(self) -> pb.EpisodeResponse:
        await self.call.write(pb.EpisodeRequest(reset=self._reset))
        return await self._read()

    async def step(self, text: str) -> pb.EpisodeResponse:
        self.turn += 1
        await self.call.write(pb.EpisodeRequest(action=pb.Action(text=text, turn=self.turn)))
        return await self._read()

    async def _read(self) -> pb.EpisodeResponse:
        answer = await self.call.read()
        if answer is grpc.aio.EOF:
            raise AssertionError(f"{await self.call.code()}: {await self.call.details()}")
        return answer


async def refused(work: Any) -> tuple[grpc.StatusCode, str]:
    try:
        await work
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    except AssertionError as error:
        code, _, details = str(error).removeprefix("StatusCode.").partition(": ")
        return grpc.StatusCode[code], details
    raise AssertionError("it was not refused")


def offer(**changes: Any) -> pb.Offer:
    described = pb.EnvironmentDescription(name="odd", step_timeout_seconds=0.3, max_parallel_episodes=0)
    base = {"protocol_version": PROTOCOL_VERSION, "token": TOKEN, "provider": "raw", "instance": "1"}
    return pb.Offer(**{**base, "environments": [described], **changes})  # type: ignore[arg-type]


async def raw_attach(service: Service, **changes: Any) -> Any:
    """The stream of a provider that this test plays by hand."""
    call = service.stub.Attach(timeout=60)
    await call.write(pb.AttachRequest(offer=offer(**changes)))
    first = await call.read()
    if first is grpc.aio.EOF:
        raise AssertionError(f"{await call.code()}: {await call.details()}")
    assert first.accepted.protocol_version == PROTOCOL_VERSION
    return call


async def health(service: Service) -> dict[str, pb.AttachedProvider]:
    return {one.provider: one for one in (await service.stub.Describe(pb.DescribeRequest())).providers}


async def to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
