"""OpenEnv servers, by their WebSocket: one connection is one session.

A full server says CAPACITY_REACHED, or in old versions closes the socket without a message. That becomes Full, so the
caller tries again later.
"""

import contextlib
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from trinity.environments.allowed import check_address, opener
from trinity.environments.arguments import Arguments
from trinity.environments.extras import needs, require
from trinity.environments.game import FORMAT_HINT, Refused, TextGame, Turn, TurnRules
from trinity.runtime.errors import Full, InvalidInput, TimedOut, Unavailable
from trinity.sdk.environment import Description

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
_MOST_SECONDS = 100  # for one answer of the server


@needs("websockets", "websockets", "openenv")
class OpenEnv(TextGame):
    """An episode on an OpenEnv server.

    Arguments: `url` (http://host:port or ws://host:port), `timeout_seconds` (30) for one answer, `action_field` for the
    field that a reply's text goes into (by default the only required one of the server's schema; a reply that is a JSON
    object is sent as it is), `observation_field` for the text that is shown (by default all of it as JSON). The row's
    `reset` are arguments of the server's reset. Rewards are the server's; success is `success_reward` (1) at least.
    """

    description = Description(
        "openenv",
        "An environment on an OpenEnv server.",
        step_timeout_seconds=_MOST_SECONDS + 20,
        reset_timeout_seconds=3 * _MOST_SECONDS + 60,  # it connects, reads the schema and resets
    )
    isolation = "thread"
    defaults = TurnRules(max_steps=100)
    instructions = FORMAT_HINT

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        url = args.text("url")
        timeout = args.number("timeout_seconds", 30.0, low=0.1, high=_MOST_SECONDS)
        field = args.text("action_field", "")
        self._observation_field = args.text("observation_field", "")
        self.success_reward = args.number("success_reward", 1.0)
        self.session = self.held.enter_context(contextlib.closing(Session(url, timeout)))
        self._action_field = field or self.session.only_field()
        answer = self.session.ask("reset", {"seed": task.integer("seed", seed), **task.mapping("reset")})
        self.goal = str(task.get("task", ""))
        return self._text(answer)

    def play(self, action: str) -> Turn:
        try:
            answer = self.session.ask("step", self._fields(action))
        except ServerError as error:  # the policy wrote no action; task and server are not at fault
            raise Refused(str(error)) from None
        reward, done = answer.get("reward"), answer.get("done")
        if not isinstance(reward, int | float | None) or not isinstance(done, bool):
            raise InvalidInput("openenv", f"the server answered reward = {reward!r}, done = {done!r}")
        gained = float(reward or 0.0)
        return Turn(self._text(answer), gained, done, done and self.total_reward + gained >= self.success_reward)

    def _fields(self, action: str) -> dict[str, Any]:
        try:
            parsed = json.loads(action)
        except (ValueError, RecursionError):
            parsed = None
        return parsed if isinstance(parsed, dict) else {self._action_field: action}

    def _text(self, answer: dict[str, Any]) -> str:
        observation = answer.get("observation")
        if self._observation_field and isinstance(observation, dict):
            observation = observation.get(self._observation_field)
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)


class ServerError(InvalidInput):
    """The server answered a message with an error."""


class Session:
    """A connection. Raises Full, Unavailable, TimedOut, ServerError, or InvalidInput for an answer against the
    protocol."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        client = require("websockets.sync.client", "openenv")
        check_address(url, "args.url")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.netloc:
            raise InvalidInput("args.url", f"is {url!r}, must begin with http://, https://, ws:// or wss://")
        secure = "s" if parts.scheme in ("https", "wss") else ""
        path = parts.path.removesuffix("/ws").rstrip("/")
        self._http = urlunsplit((f"http{secure}", parts.netloc, path, "", ""))
        self._timeout = timeout_seconds
        address = urlunsplit((f"ws{secure}", parts.netloc, f"{path}/ws", "", ""))
        host, port = str(parts.hostname), parts.port or (443 if secure else 80)
        try:
            # A client that is given its socket follows no redirect, which may lead to an address that is not allowed.
            sock = socket.create_connection((host, port), timeout_seconds)
            connecting = client.connect(
                address,
                sock=sock,
                open_timeout=timeout_seconds,
                max_size=MAX_MESSAGE_BYTES,
                close_timeout=2,
                proxy=None,
            )
            self._open = contextlib.ExitStack()
            self._socket = self._open.enter_context(connecting)
        except Exception as error:
            raise Unavailable(f"openenv: {address} does not answer: {error}") from None

    def only_field(self) -> str:
        """The one field that an action must have by the server's schema."""
        try:
            with opener().open(f"{self._http}/schema", timeout=self._timeout) as response:
                required = json.loads(response.read(MAX_MESSAGE_BYTES))["action"]["required"]
                (name,) = required
                return str(name)
        except Exception as error:
            raise InvalidInput(
                "args.action_field", f"is missing, and {self._http}/schema does not name one required field ({error})"
            ) from None

    def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message, give the `data` of the observation that answers it."""
        closed = require("websockets.exceptions", "openenv").ConnectionClosed
        end = time.monotonic() + self._timeout
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            text = self._socket.recv(timeout=max(end - time.monotonic(), 0))
        except TimeoutError:
            raise TimedOut(f"openenv: the server took longer than {self._timeout:g} s for one {kind}") from None
        except closed as error:
            if kind == "reset" and error.rcvd is not None and error.rcvd.code == 1000:
                raise Full("openenv: the server takes no more sessions; try again later") from None
            raise Unavailable(f"openenv: the server closed the connection ({error})") from None
        return _observation(text)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # it may be gone already
            self._socket.send(json.dumps({"type": "close"}))
        self._open.close()


def _observation(text: str | bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
        kind, data = message["type"], message.get("data")
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InvalidInput("openenv", f"the server's message is none: {str(text[:80])!r}") from None
    if kind == "error":
        code = data.get("code") if isinstance(data, dict) else None
        if code == "CAPACITY_REACHED":
            raise Full("openenv: the server takes no more sessions; try again later")
        if code in ("FACTORY_ERROR", "SESSION_ERROR"):
            raise Unavailable(f"openenv: the server has no environment: {json.dumps(data)[:500]}")
        raise ServerError("openenv", f"the server refused: {json.dumps(data)[:500]}")
    if kind != "observation" or not isinstance(data, dict):
        raise InvalidInput("openenv", f"the server's message is of type {kind!r}, must be an observation")
    return data
