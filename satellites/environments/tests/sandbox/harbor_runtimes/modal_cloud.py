"""Modal's API, for its own SDK: a server by the stubs of the package modal (held.py)."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from grpclib import GRPCError, Status
from grpclib.server import Server, Stream
from held import begin, end, ends, fails
from modal_proto import api_pb2 as pb
from modal_proto import task_command_router_pb2 as router
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

BUILT = pb.GenericResult(status=pb.GenericResult.GENERIC_STATUS_SUCCESS)
ENDED = pb.GenericResult(status=pb.GenericResult.GENERIC_STATUS_TERMINATED, exitcode=137)
names = dict[str, str]()  # by sandbox


def answer(reply: Callable[[Any], Any]) -> Callable[[Any, Stream[Any, Any]], Any]:
    """A method of a server, which answers one message with one message."""

    async def method(_: Any, stream: Stream[Any, Any]) -> None:
        asked = await stream.recv_message()
        assert stream.metadata is not None
        if stream.metadata.get("x-modal-token-id", "ak-key") != "ak-key":
            raise GRPCError(Status.UNAUTHENTICATED, "no such key")
        await stream.send_message(reply(asked))

    return method


def create(asked: pb.SandboxCreateV2Request) -> pb.SandboxCreateV2Response:
    if asked.definition.name in {names[one] for one in ends}:
        raise GRPCError(Status.ALREADY_EXISTS, "the name is taken")
    begin(asked.definition.timeout_secs, name := f"sb-{uuid4().hex}")
    names[name] = asked.definition.name
    if fails():
        raise GRPCError(Status.RESOURCE_EXHAUSTED, "no capacity")
    access = pb.CommandRouterAccess(jwt="token", url=url)
    return pb.SandboxCreateV2Response(sandbox_id=name, task_id=f"ta-{name}", command_router_access=access)


def terminate(asked: pb.SandboxTerminateRequest) -> pb.SandboxTerminateResponse:
    if fails():
        raise GRPCError(Status.INTERNAL, "try again")
    if asked.sandbox_id in ends:
        end(asked.sandbox_id)
    return pb.SandboxTerminateResponse()


class Control(ModalClientBase):
    ClientHello = answer(lambda _: pb.ClientHelloResponse())
    AuthTokenGet = answer(lambda _: pb.AuthTokenGetResponse(token="e30.eyJleHAiOjk5OTk5OTk5OTl9.none"))
    EnvironmentGetOrCreate = answer(
        lambda _: pb.EnvironmentGetOrCreateResponse(
            environment_id="en-1",
            metadata=pb.EnvironmentMetadata(
                name="main", settings=pb.EnvironmentSettings(image_builder_version="2025.06")
            ),
        )
    )
    AppGetOrCreate = answer(lambda _: pb.AppGetOrCreateResponse(app_id="ap-1"))
    ImageGetOrCreate = answer(lambda _: pb.ImageGetOrCreateResponse(image_id="im-1", result=BUILT))
    SandboxCreateV2 = answer(create)
    SandboxTerminateV2 = answer(terminate)
    SandboxWaitV2 = answer(lambda asked: pb.SandboxWaitResponse(result=None if asked.sandbox_id in ends else ENDED))


class Commands(TaskCommandRouterBase):
    TaskExecStart = answer(lambda _: router.TaskExecStartResponse())
    TaskExecWait = answer(lambda _: router.TaskExecWaitResponse(code=0))

    async def TaskExecStdioRead(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()


Control.__abstractmethods__ = Commands.__abstractmethods__ = frozenset()  # the SDK calls no others


async def main() -> None:
    server = Server([Control(), Commands()])
    await server.start(sock=listener)
    print(listener.getsockname()[1], flush=True)
    await server.wait_closed()


listener = socket.create_server(("127.0.0.1", 0))
url = f"http://127.0.0.1:{listener.getsockname()[1]}"
asyncio.run(main())
