"""Players of one episode: in the event loop, or in a thread.

A player gets `play` with a reset, then with actions, one at a time, each within its time limit; then `close`, once,
which never waits for a call that hangs. The episode's slot is free when everything is released.
"""

import asyncio
import contextlib
import inspect
import logging
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from trinity.sdk import wire
from trinity.sdk.contract import Action, Answer, Reset
from trinity.sdk.environment import EnvironmentClass, Observation
from trinity.sdk.errors import Broken, InvalidInput, TimedOut, text_of

log = logging.getLogger(__name__)

Message = Reset | Action
Release = Callable[[], None]


class Player(Protocol):
    """One episode."""

    async def play(self, message: Message, seconds: float) -> Answer:
        """Returns the answer. Raises the episode's error, or TimedOut after `seconds`; no call may follow an error."""

    async def close(self) -> None:
        """Releases everything, now or in the background."""


def too_slow(message: Message, seconds: float) -> TimedOut:
    method = "step" if isinstance(message, Action) else "restore" if message.state else "reset"
    return TimedOut(f"it took longer than {seconds:g} s for one {method}")


class Actor:
    """The object of one episode. Its methods may be coroutines; methods of this class await nothing else."""

    def __init__(self, kind: EnvironmentClass) -> None:
        self._kind = kind
        self._environment: Any = None
        self._keep_states = False

    async def play(self, message: Message) -> Answer:
        """Raises the environment's errors, and InvalidInput for a state that it refuses."""
        if self._environment is None:
            self._environment = self._kind()
        if isinstance(message, Action):
            observation = await _value(self._environment.step(message.text))
        else:
            self._keep_states = message.keep_states
            made = self._restored(message) if message.state else self._environment.reset(*wire.reset_arguments(message))
            observation = await _value(made)
        state = b""
        if self._keep_states and isinstance(observation, Observation) and not observation.done:
            state = wire.sealed(self._kind.description.name, await _value(self._environment.snapshot()))
        return wire.answer(observation, message.turn, state)

    async def _restored(self, reset: Reset) -> Observation:
        state = wire.opened(self._kind.description.name, reset.state)
        try:
            await _value(self._environment.restore(state))
        except (TimedOut, TimeoutError):
            raise
        except Exception as error:
            raise InvalidInput("reset.state", f"cannot be restored: {type(error).__name__}: {error}") from error
        return Observation("")

    async def close(self) -> None:
        if self._environment is not None:
            await _value(self._environment.close())


async def _value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def finished(work: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine that never waits. Raises Broken if it waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise Broken("a coroutine of it waits; derive its class from AsyncEnvironment")


class LoopPlayer:
    """isolation "none"."""

    def __init__(self, kind: EnvironmentClass, release: Release) -> None:
        self._actor = Actor(kind)
        self._release = release

    async def play(self, message: Message, seconds: float) -> Answer:
        limit = asyncio.timeout(seconds)  # no new task, in which SystemExit would end the loop
        try:
            async with limit:
                return await self._actor.play(message)
        except TimeoutError:
            if limit.expired():
                raise too_slow(message, seconds) from None
            raise

    async def close(self) -> None:
        try:
            await self._actor.close()
        finally:
            self._release()


class ThreadPlayer:
    """isolation "thread": all calls of the episode run in one thread, which ends with it."""

    def __init__(self, kind: EnvironmentClass, release: Release) -> None:
        self._kind = kind
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[asyncio.Future[Any], Message] | None] = queue.SimpleQueue()
        self._ended = self._loop.create_future()
        self._hangs = False
        # A daemon: the process may end while a call hangs.
        threading.Thread(target=self._run, daemon=True, name=f"episode-{kind.description.name}").start()

    async def play(self, message: Message, seconds: float) -> Answer:
        future = self._loop.create_future()
        self._work.put((future, message))
        self._hangs = True
        try:
            async with asyncio.timeout(seconds):
                answer: Answer = await future
        except TimeoutError:
            if future.done() and not future.cancelled():  # the environment's own
                self._hangs = False
                raise
            raise too_slow(message, seconds) from None
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._hangs = False
            raise
        self._hangs = False
        return answer

    async def close(self) -> None:
        self._work.put(None)
        if not self._hangs:
            await asyncio.shield(self._ended)

    def _run(self) -> None:
        actor = Actor(self._kind)
        while (item := self._work.get()) is not None:
            future, message = item
            try:
                result, error = finished(actor.play(message)), None
            except BaseException as raised:
                result, error = None, raised
            self._call_in_loop(_resolve, future, result, error)
            future = result = error = None  # type: ignore[assignment]  # no reference outlives its call
        try:
            finished(actor.close())
        except BaseException:
            log.exception("close of %s failed", self._kind.description.name)
        self._call_in_loop(self._finish)

    def _call_in_loop(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
            self._loop.call_soon_threadsafe(function, *args)

    def _finish(self) -> None:
        self._release()
        if not self._ended.done():
            self._ended.set_result(None)


def _resolve(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():  # the caller is gone
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # SystemExit of an environment ends its episode, never the service; futures take no StopIteration
        future.set_exception(RuntimeError(f"{type(error).__name__}: {text_of(error)}"))
