"""The session that a workflow gives its agent: access to the policy, and the reward."""

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trinity.data.experience import Experience
from trinity.explorer.serving.asgi import App
from trinity.explorer.sessions.session import Session, SessionFailed
from trinity.runtime.trust.tls import public_authorities

if TYPE_CHECKING:
    import openai

MODEL = "policy"


def without_proxy(url: str) -> str:
    """The value of `no_proxy` for a child process that also calls `url`."""
    there = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    return ",".join(filter(None, [there, urlsplit(url).hostname]))


def http_client(kind: Any, base_url: str, transport: Any = None) -> Any:
    """An HTTP client of this class whose calls of `base_url` take this transport, by default a socket without a proxy.

    Calls elsewhere use the shell's proxies. If one of these is unusable here, as SOCKS without a package, none does.
    """
    given = {"verify": public_authorities(), "mounts": {base_url.removesuffix("/v1"): transport}}
    try:
        return kind(**given)
    except Exception:  # of any type, as the library chooses
        return kind(**given, trust_env=False)


@dataclass
class AgentSession:
    """An agent's session: a base_url and a key, or one of OpenAI's clients with both.

    Set `reward`, of the session or of each branch, before the session ends.
    """

    session: Session
    base_url: str
    key: str = field(repr=False)
    timeout_seconds: float
    app: Callable[[], Awaitable[App]] = field(repr=False)
    reward: float | Sequence[float] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    rollout: int = 0  # number in its group
    model: str = MODEL

    @cached_property
    def sync(self) -> "openai.OpenAI":
        """A client for agents in a thread (asyncio.to_thread). The explorer's event loop answers it."""
        import openai

        http = http_client(openai.DefaultHttpxClient, self.base_url)
        return openai.OpenAI(http_client=http, **self._arguments)

    @cached_property
    def asynchronous(self) -> "openai.AsyncOpenAI":
        """A client for agents in the explorer's event loop. It calls the gateway without a socket."""
        import openai

        from trinity.explorer.sessions.in_process import InProcess

        http = http_client(openai.DefaultAsyncHttpxClient, self.base_url, InProcess(self.app))
        return openai.AsyncOpenAI(http_client=http, **self._arguments)

    @property
    def _arguments(self) -> dict[str, Any]:
        return {"base_url": self.base_url, "api_key": self.key, "timeout": self.timeout_seconds}

    @property
    def environment(self) -> dict[str, str]:
        """Variables that OpenAI's and Anthropic's clients read, for an agent in another process.

        `no_proxy` names the gateway too, so that a web proxy of the shell does not get the session's calls.
        """
        root = self.base_url.removesuffix("/v1")
        openai = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.key}
        proxied = {name: without_proxy(self.base_url) for name in ("no_proxy", "NO_PROXY")}
        return {**openai, "ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": self.key, **proxied}

    def experiences(self, rollout: int) -> list[Experience]:
        """One experience for each branch. Raises the session's failure, or SessionFailed without a reward."""
        if self.reward is None:
            raise self.session.failure or SessionFailed("the session ended without a reward")
        return self.session.finish(rollout, self.reward)

    async def close(self) -> None:
        """Close the clients, which the agent may have closed already."""
        if "sync" in vars(self):
            self.sync.close()
        if "asynchronous" in vars(self):
            await self.asynchronous.close()
