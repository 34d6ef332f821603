"""Connects OpenAI's asynchronous client to an ASGI application in the same event loop, without a socket.

Two ends of HTTP in one process would take more processor time than the gateway. As over a socket, an answer comes in
parts, the application learns when the client leaves, and a client that does not read blocks the answer.
"""

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai

from trinity.explorer.serving.asgi import App

# The library that openai's clients derive from: httpx2 since openai 3, httpx before.
_HTTP = next(kind.__module__ for kind in openai.DefaultAsyncHttpxClient.__mro__ if kind.__name__ == "AsyncClient")
_http: Any = sys.modules[_HTTP.partition(".")[0]]
_PARTS = 64  # unread parts of an answer


class InProcess(_http.AsyncBaseTransport):
    """The transport of a client."""

    def __init__(self, app: Callable[[], Awaitable[App]]) -> None:
        """`app` waits until the application is made. Its errors fail the client's connection."""
        self._app = app
        self._loop = asyncio.get_running_loop()
        self._running: dict[asyncio.Task[None], _Exchange] = {}

    async def handle_async_request(self, request: Any) -> Any:
        if asyncio.get_running_loop() is not self._loop:
            raise _http.ConnectError("this client is for the explorer's event loop; in a thread use agent.sync")
        exchange = _Exchange(request, await request.aread())
        running = asyncio.create_task(exchange.run(self._app))
        self._running[running] = exchange
        running.add_done_callback(self._running.pop)
        try:
            begun = await exchange.next()
        except BaseException:
            exchange.leave()
            raise
        return _http.Response(begun["status"], headers=begun.get("headers", []), stream=_Body(exchange))

    async def aclose(self) -> None:
        for exchange in self._running.values():
            exchange.leave()


class _Body(_http.AsyncByteStream):
    """The body of an answer."""

    def __init__(self, exchange: "_Exchange") -> None:
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._exchange.next()
            more = message.get("more_body", False)
            yield message.get("body", b"")

    async def aclose(self) -> None:
        self._exchange.leave()


class _Exchange:
    """A request and its answer."""

    def __init__(self, request: Any, body: bytes) -> None:
        self._request = request
        self._unread = [body]
        self._left = asyncio.Event()
        self._parts: deque[dict[str, Any]] = deque()
        self._room, self._news = asyncio.Semaphore(_PARTS), asyncio.Event()
        self._ended = False
        self._error: Exception | None = None

    async def run(self, app: Callable[[], Awaitable[App]]) -> None:
        """Run the application. The client gets the last part after the application has ended, so that its last actions
        precede the client's next."""
        last: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                last.append(message)
            else:
                await self._give(message)

        try:
            await (await app())(self._scope(), self._receive, send)
            for message in last:
                await self._give(message)
        except Exception as error:
            self._error = error
        finally:
            self._ended = True
            self._news.set()

    def _scope(self) -> dict[str, Any]:
        """The ASGI scope, with uvicorn's fields."""
        url = self._request.url
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self._request.method,
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.split(b"?")[0],
            "query_string": url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in self._request.headers.raw],
            "server": (url.host, url.port),
            "client": None,
            "state": {},
        }

    async def _receive(self) -> dict[str, Any]:
        if self._unread:
            return {"type": "http.request", "body": self._unread.pop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _give(self, message: dict[str, Any]) -> None:
        if not self._left.is_set():
            await self._room.acquire()
            self._parts.append(message)
            self._news.set()

    async def next(self) -> dict[str, Any]:
        """The next message of the answer. Raises the client library's errors, ReadTimeout after the client's limit."""
        try:
            async with asyncio.timeout(self._request.extensions.get("timeout", {}).get("read")):
                while not self._parts and not self._ended:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise _http.ReadTimeout("the answer took too long", request=self._request) from None
        if not self._parts:
            problem = f"the answer ended before it was complete: {self._error}"
            raise _http.RemoteProtocolError(problem, request=self._request) from self._error
        self._room.release()
        return self._parts.popleft()

    def leave(self) -> None:
        """Drop the rest, because the client left."""
        self._left.set()
        self._room.release()  # for a part that waits and is not taken
