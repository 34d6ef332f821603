"""The calling side of many episodes over one stream. Calls carry an id, by which replies reach their callers."""

import asyncio
from collections.abc import Callable

import grpc

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.sdk.errors import ContractViolation, Failed, failed


class Peer:
    """The playing side at the other end of a stream. `send` queues a call and never waits."""

    def __init__(self, send: Callable[[pb.ProviderCall], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[pb.ProviderReply]] = {}
        self._ids: dict[int, str] = {}
        self._next = 0
        # Replies without a call. A few arrive after their episode was closed.
        self.strays = 0
        self._gone: tuple[grpc.StatusCode, str] | None = None

    @property
    def open(self) -> int:
        """Ids in use."""
        return len(self._ids)

    @property
    def gone(self) -> bool:
        """Whether the stream is over."""
        return self._gone is not None

    def begin(self) -> int:
        """A new id. Raises what ended the stream."""
        if self._gone is not None:
            raise Failed(*self._gone)
        self._next += 1
        self._ids[self._next] = ""
        return self._next

    async def ask(self, call: pb.ProviderCall) -> pb.ProviderReply:
        """The reply. One call of an id at a time. Raises Failed, ContractViolation, or what ended the stream."""
        if self._gone is not None:
            raise Failed(*self._gone)
        problem = self._ids.get(call.id, "the episode is closed")
        if problem:
            raise ContractViolation(problem)
        future: asyncio.Future[pb.ProviderReply] = asyncio.get_running_loop().create_future()
        self._waiting[call.id] = future
        self._send(call)
        try:
            reply = await future
        finally:
            self._waiting.pop(call.id, None)
        if reply.WhichOneof("reply") == "failure":
            raise failed(reply.failure.code, reply.failure.message)
        return reply

    def end(self, identity: int) -> None:
        """Release an id. A reply that is still on its way counts as stray."""
        if self._ids.pop(identity, None) is not None and self._gone is None:
            self._send(pb.ProviderCall(id=identity, close=pb.Close()))

    def deliver(self, reply: pb.ProviderReply) -> None:
        """A reply came in."""
        future = self._waiting.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)
        elif reply.id in self._ids:
            self._ids[reply.id] = "it answered a call that was not made"
        else:  # the other side holds what this one does not know
            self.strays += 1
            self._send(pb.ProviderCall(id=reply.id, close=pb.Close()))

    def fail(self, code: grpc.StatusCode, message: str) -> None:
        """The stream is over: pending and later calls raise the reason. The first reason stays."""
        if self._gone is not None:
            return
        self._gone = code, message
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Failed(code, message))
