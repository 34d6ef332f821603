"""The playing side of many episodes over one stream. Each episode has a task that gets its calls in order."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from trinity.sdk import wire
from trinity.sdk.arena import Arena
from trinity.sdk.contract import Action, Call, Close, Failure, Reply, Reset, ScoreRequest
from trinity.sdk.errors import InvalidInput, number_of, status_of
from trinity.sdk.outbox import Outbox

# Calls of one id that may wait: an honest caller waits for each reply before the next call.
_MAX_WAITING = 2


class Dispatcher:
    """Takes calls, puts replies into the outbox."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._calls: dict[int, asyncio.Queue[Call]] = {}
        self.outbox: Outbox[wire.ReplyMessage] = Outbox()

    def dispatch(self, call: Call) -> None:
        """Never waits and never raises."""
        if isinstance(call.message, Close):
            if (task := self._tasks.get(call.id)) is not None:
                task.cancel()
        elif call.id in self._tasks:
            calls = self._calls.get(call.id)
            if calls is not None and calls.qsize() < _MAX_WAITING:
                calls.put_nowait(call)
        elif isinstance(call.message, Reset):
            self._calls[call.id] = asyncio.Queue()
            self._begin(call.id, self._episode(call.id, call.message))
        elif isinstance(call.message, ScoreRequest):
            self._begin(call.id, self._score(call.id, call.message))
        else:
            self._fail(call.id, InvalidInput("call", "is of no episode that is open here"))

    async def close(self) -> None:
        """Ends every episode: the stream is gone."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, identity: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[identity] = task
        task.add_done_callback(lambda _: self._forget(identity))

    def _forget(self, identity: int) -> None:
        self._tasks.pop(identity, None)
        self._calls.pop(identity, None)

    async def _episode(self, identity: int, reset: Reset) -> None:
        calls = self._calls[identity]
        try:
            async with self._arena.enter(reset.environment) as episode:
                self._reply(Reply(identity, await episode.reset(reset)))
                while True:
                    action = (await calls.get()).message
                    if not isinstance(action, Action):
                        raise InvalidInput("action", "is missing; after reset every call is an action")
                    self._reply(Reply(identity, await episode.step(action)))
        except Exception as error:
            self._fail(identity, error)

    async def _score(self, identity: int, request: ScoreRequest) -> None:
        try:
            self._reply(Reply(identity, await self._arena.score(request)))
        except Exception as error:
            self._fail(identity, error)

    def _fail(self, identity: int, error: Exception) -> None:
        code, message = status_of(error)
        self._reply(Reply(identity, Failure(number_of(code), message)))

    def _reply(self, reply: Reply) -> None:
        self.outbox.put(wire.reply_to_proto(reply))
