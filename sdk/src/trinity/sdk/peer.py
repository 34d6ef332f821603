"""The calling side of many episodes over one stream. A call's id leads its reply to the caller."""

import asyncio
from collections.abc import Callable

import grpc

from trinity.sdk.contract import Call, Close, Failure, Reply
from trinity.sdk.errors import ContractViolation, Failed, failed


class Peer:
    """The playing side at the other end of a stream. `send` queues a call and never waits."""

    def __init__(self, send: Callable[[Call], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._ids: dict[int, str] = {}
        self._next = 0
        # Replies without a call. A few arrive after their episode was closed.
        self.strays = 0
        self._gone: tuple[grpc.StatusCode, str] | None = None

    @property
    def open(self) -> int:
        """Returns the number of ids in use."""
        return len(self._ids)

    @property
    def gone(self) -> bool:
        """Returns True once the stream is over."""
        return self._gone is not None

    def begin(self) -> int:
        """Returns a new id. Raises the error that ended the stream."""
        if self._gone is not None:
            raise Failed(*self._gone)
        self._next += 1
        self._ids[self._next] = ""
        return self._next

    async def ask(self, call: Call) -> Reply:
        """Returns the reply to a call; one call of an id at a time. Raises Failed, or ContractViolation."""
        if self._gone is not None:
            raise Failed(*self._gone)
        problem = self._ids.get(call.id, "the episode is closed")
        if problem:
            raise ContractViolation(problem)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call.id] = future
        self._send(call)
        try:
            reply = await future
        finally:
            self._waiting.pop(call.id, None)
        if isinstance(reply.result, Failure):
            raise failed(reply.result.code, reply.result.message)
        return reply

    def end(self, identity: int) -> None:
        """Releases an id. A reply still on its way counts as stray."""
        if self._ids.pop(identity, None) is not None and self._gone is None:
            self._send(Call(identity, Close()))

    def deliver(self, reply: Reply) -> None:
        """Hands a reply to its caller."""
        future = self._waiting.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)
        elif reply.id in self._ids:
            self._ids[reply.id] = "it answered a call that was not made"
        else:  # the other side holds an episode unknown here
            self.strays += 1
            self._send(Call(reply.id, Close()))

    def fail(self, code: grpc.StatusCode, message: str) -> None:
        """Ends the stream: pending and later calls raise the reason. The first reason stays."""
        if self._gone is not None:
            return
        self._gone = code, message
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Failed(code, message))
