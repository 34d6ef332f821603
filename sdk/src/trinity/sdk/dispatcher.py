"""The playing side of many episodes over one stream. Each has a task that gets its calls in order."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.sdk.arena import Arena
from trinity.sdk.errors import InvalidInput, number_of, status_of
from trinity.sdk.outbox import Outbox

# Calls of one id that may wait: an honest caller waits for the reply to one before it makes the next.
_MAX_WAITING = 2


class Dispatcher:
    """Takes calls, puts replies into the outbox."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._calls: dict[int, asyncio.Queue[pb.ProviderCall]] = {}
        self.outbox: Outbox[pb.ProviderReply] = Outbox()

    def dispatch(self, call: pb.ProviderCall) -> None:
        """Never waits and never raises."""
        kind = call.WhichOneof("call")
        if kind == "close":
            if (task := self._tasks.get(call.id)) is not None:
                task.cancel()
        elif call.id in self._tasks:
            calls = self._calls.get(call.id)
            if calls is not None and calls.qsize() < _MAX_WAITING:
                calls.put_nowait(call)
        elif kind == "reset":
            self._calls[call.id] = asyncio.Queue()
            self._begin(call, self._episode(call))
        elif kind == "score":
            self._begin(call, self._score(call))
        else:
            self._fail(call.id, InvalidInput("call", "is of no episode that is open here"))

    async def close(self) -> None:
        """The stream is gone: every episode ends."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, call: pb.ProviderCall, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[call.id] = task
        task.add_done_callback(lambda _: self._forget(call.id))

    def _forget(self, identity: int) -> None:
        self._tasks.pop(identity, None)
        self._calls.pop(identity, None)

    async def _episode(self, call: pb.ProviderCall) -> None:
        calls = self._calls[call.id]
        try:
            async with self._arena.enter(call.reset.environment) as episode:
                self.outbox.put(pb.ProviderReply(id=call.id, response=await episode.reset(call.reset)))
                while True:
                    following = await calls.get()
                    if following.WhichOneof("call") != "action":
                        raise InvalidInput("action", "is missing; after reset every call is an action")
                    response = await episode.step(following.action)
                    self.outbox.put(pb.ProviderReply(id=call.id, response=response))
        except Exception as error:
            self._fail(call.id, error)

    async def _score(self, call: pb.ProviderCall) -> None:
        try:
            scores = await self._arena.score(call.score)
            self.outbox.put(pb.ProviderReply(id=call.id, scores=scores))
        except Exception as error:
            self._fail(call.id, error)

    def _fail(self, identity: int, error: Exception) -> None:
        code, message = status_of(error)
        failure = pb.Failure(code=number_of(code), message=message)
        self.outbox.put(pb.ProviderReply(id=identity, failure=failure))
