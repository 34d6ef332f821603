"""The stream of a further node to the first one."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import grpc.aio

from trinity.api.trainer.v1 import trainer_pb2 as pb
from trinity.api.trainer.v1 import trainer_pb2_grpc
from trinity.runtime import rpc
from trinity.runtime.errors import TimedOut
from trinity.trainer import wire
from trinity.trainer.process.nodes import BEAT_SECONDS, Beat, FromNode, ToNode


async def join_node(
    channel: grpc.aio.Channel, outbox: "asyncio.Queue[FromNode]", silent_seconds: float
) -> AsyncGenerator[ToNode, None]:
    """Sends the messages of the outbox, and yields the answers until the first node ends the stream.

    Raises TimedOut if it is silent, and what it refuses.
    """
    method = trainer_pb2_grpc.TrainerServiceStub(channel).JoinNode
    call = method(_requests(outbox))
    try:
        with rpc.translate(method):
            while True:
                async with asyncio.timeout(silent_seconds):
                    answer = await call.read()
                if answer is grpc.aio.EOF:
                    return
                yield wire.from_first(answer)
    except TimeoutError:
        raise TimedOut(f"the first node has been silent for {silent_seconds:g} s") from None
    finally:
        call.cancel()


async def _requests(outbox: "asyncio.Queue[FromNode]") -> AsyncIterator[pb.JoinNodeRequest]:
    while True:
        message: FromNode = Beat()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEAT_SECONDS):
                message = await outbox.get()
        yield wire.to_first(message)
