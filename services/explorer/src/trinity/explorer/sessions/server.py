"""The gateway of agents. It listens on a port of the loopback from the first session until the explorer ends."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from trinity.data.experience import SamplingParams
from trinity.data.vision import ImageRules
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.serving import endpoint
from trinity.explorer.serving.asgi import App
from trinity.explorer.serving.bounds import Bounds, bounded
from trinity.explorer.sessions.agents import MODEL, AgentSession
from trinity.explorer.sessions.front import Front
from trinity.explorer.sessions.gateway import Gateway
from trinity.explorer.sessions.offers import OutsideSessions
from trinity.explorer.sessions.recording import RecordingClient
from trinity.explorer.sessions.session import Sessions
from trinity.explorer.types import EngineFailed
from trinity.plugins import satellites
from trinity.runtime.errors import InvalidInput
from trinity.runtime.trust.keys import KeyFile

log = structlog.get_logger(__name__)

_HOST, _EVERYWHERE = "127.0.0.1", "0.0.0.0"


@dataclass(frozen=True)
class OpenTo:
    """Access for outside programs at `listen` (host:port), with `keys`. `model`: the policy's name outside sessions.

    `sampling`: of plain calls that the run learns from; None if it learns from none.
    """

    listen: str
    keys: KeyFile
    model: str
    sampling: SamplingParams | None = None


class AgentGateway:
    """Sessions on this explorer's engines. `options`: further options of `vllm serve`, such as the tool parser."""

    def __init__(
        self,
        pool: EnginePool,
        model: str,
        chat_template: str,
        rewrites_history: bool,
        options: Sequence[str] = (),
        open_to: OpenTo | None = None,
        agent_wait: float = 600.0,
        bounds: Bounds | None = None,
        images: ImageRules | None = None,
    ) -> None:
        """`open_to`: access for outside programs, which begins with `start`. `agent_wait`: how long (seconds) a group
        waits for a program to open its first session. `images`: as Gateway's."""
        self._open_to, self._bounds, self._images = open_to, bounds or Bounds(), images
        self.calls: Any = None  # of trinity-traffic; set before `start`, where plain calls are recorded
        self._client = RecordingClient(pool, rewrites_history)
        served = [MODEL, *([open_to.model] if open_to is not None else [])]
        self._options = ["--model", model, "--served-model-name", *served, *options]
        self._template = chat_template
        self._sessions = Sessions()
        self.outside = OutsideSessions(self._sessions, agent_wait, self._bounds.reward)
        self._app: App | None = None
        self._built = asyncio.Event()
        self._socket: socket.socket | None = None
        self._server: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def session(self, sampling: SamplingParams, timeout_seconds: float) -> AsyncIterator[AgentSession]:
        """Open a session, and close it at the end of the context."""
        session, key = self._sessions.open(sampling)
        agent = AgentSession(session, self._base_url(), key, timeout_seconds, self._application)
        try:
            yield agent
        except Exception as error:  # the agent's error is a consequence of the session's failure
            if session.failure is not None and error is not session.failure:
                raise session.failure from error
            raise
        finally:
            self._sessions.close(session)
            await agent.close()

    def start(self) -> None:
        """Listen at once. Calls wait for vLLM's application. Raises InvalidInput if the address is not usable."""
        if self._socket is not None:
            return
        listen = self._open_to.listen if self._open_to is not None else f"{_HOST}:0"
        self._socket = endpoint.listen_at(listen)
        self._server = asyncio.get_running_loop().create_task(self._serve(self._socket))

    def _base_url(self) -> str:
        """The gateway's URL for agents on this machine."""
        self.start()
        assert self._socket is not None
        host, port = self._socket.getsockname()[:2]
        return f"http://{_HOST if host == _EVERYWHERE else host}:{port}/v1"

    async def _serve(self, listening: socket.socket) -> None:
        try:
            app = await endpoint.application(self._client, self._options, self._template)
            self._app = Gateway(app, self._sessions, MODEL, bounds=self._bounds, images=self._images)
        except (SystemExit, KeyError, TypeError, ValueError) as error:
            raise InvalidInput("explorer.rollout_model", f"vLLM refuses {self._options}: {error}") from error
        finally:
            self._built.set()
        address = ":".join(map(str, listening.getsockname()))
        log.info("explorer.gateway.serving", address=f"http://{address}/v1")
        open_to = self._open_to
        async with contextlib.AsyncExitStack() as stack:
            plain = bounded(app, self._bounds)
            if self.calls is not None and open_to is not None and open_to.sampling is not None:
                plain = traffic = satellites.find("traffic").recording(plain, self.calls, open_to.sampling)
                stack.push_async_callback(traffic.close)
            served = Front(self._app, self.outside, plain, open_to.keys) if open_to is not None else self._app
            await endpoint.run(served, [listening])

    async def _application(self) -> App:
        """The gateway's application, once it is made."""
        await self._built.wait()
        if self._app is None:
            raise EngineFailed("the gateway of agents did not start")
        return self._app

    async def check(self) -> None:
        """Raises EngineFailed if the server is gone, InvalidInput if vLLM refused its options."""
        if self._server is not None and self._server.done():
            error = None if self._server.cancelled() else self._server.exception()
            if isinstance(error, InvalidInput):
                raise error
            raise EngineFailed(f"the gateway of agents ended: {error}") from error

    async def close(self) -> None:
        if self._server is not None:
            self._server.cancel()
            await asyncio.wait([self._server])
        if self._socket is not None:  # in case the server did not take it over
            self._socket.close()
