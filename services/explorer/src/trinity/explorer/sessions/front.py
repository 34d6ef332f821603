"""Routes an explorer's HTTP calls: outside programs open and end their sessions here.

    POST /v1/sessions            with a key of the endpoint: returns a waiting rollout with its base_url and key
    POST /v1/sessions/close      with the session's key: sends its reward
    POST /v1/sessions/abandon    with the session's key: sends the reason for no reward

vLLM answers every other call with a key of the endpoint, without recording; the gateway answers the rest.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trinity.data.experience import TaskKind
from trinity.explorer.serving.asgi import (
    App,
    Receive,
    Refused,
    Send,
    is_preflight,
    key_of,
    read_json,
    send_error,
    send_json,
)
from trinity.explorer.sessions.offers import Offer, OutsideSessions
from trinity.runtime.errors import Conflict, InvalidInput, TrinityError, Unauthenticated, Unavailable
from trinity.runtime.trust.keys import KeyFile

_READ_SECONDS = 60.0
_SESSIONS = "/v1/sessions"
_STATUSES: list[tuple[type[TrinityError], int, str]] = [
    (InvalidInput, 400, "invalid_value"),
    (Unauthenticated, 401, "invalid_api_key"),
    (Conflict, 409, "session_ended"),
    (Unavailable, 503, "no_rollout_waits"),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Open(_Body):
    taskset: str = ""
    task_id: str = ""
    wait_seconds: float = 0.0
    limit_seconds: float = 0.0


class _Close(_Body):
    reward: float | None = None
    rewards: list[float] = Field(default_factory=list)
    metrics: dict[str, float] = Field(default_factory=dict)


class _Abandon(_Body):
    reason: str = ""


_Given = TypeVar("_Given", bound=_Body)


class Front:
    """`plain` is vLLM's application. `keys` allow to open sessions and to call `plain`."""

    def __init__(self, gateway: App, outside: OutsideSessions, plain: App, keys: KeyFile) -> None:
        self._gateway, self._outside, self._plain, self._keys = gateway, outside, plain, keys
        self._answers: dict[str, Callable[[Any, Receive], Awaitable[dict[str, Any]]]] = {
            _SESSIONS: self._open,
            f"{_SESSIONS}/close": self._close,
            f"{_SESSIONS}/abandon": self._abandon,
        }

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        answer = self._answers.get(scope["path"]) if scope["type"] == "http" else None
        if answer is None:
            keyed = scope["type"] == "lifespan" or is_preflight(scope) or self._may_open(scope)
            await (self._plain if keyed else self._gateway)(scope, receive, send)
            return
        try:
            if scope["method"] != "POST":
                raise Refused(405, "method_not_allowed", f"send POST, not {scope['method']}")
            await send_json(send, 200, await answer(scope, receive))
        except Refused as refused:
            await send_error(send, refused, scope["path"])
        except TrinityError as error:
            status, code = next(((s, c) for kind, s, c in _STATUSES if isinstance(error, kind)), (500, "server_error"))
            await send_error(send, Refused(status, code, str(error), getattr(error, "field", None)), scope["path"])

    def _may_open(self, scope: Any) -> bool:
        return self._keys.allows(f"Bearer {key_of(scope)}")

    async def _open(self, scope: Any, receive: Receive) -> dict[str, Any]:
        if not self._may_open(scope):
            raise Refused(401, "invalid_api_key", "send a key of the endpoint as `Authorization: Bearer <key>`")
        given = _parsed(_Open, await read_json(receive, _READ_SECONDS))
        opening = asyncio.create_task(self._outside.open(**given.model_dump()))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait([opening, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                raise Refused(400, "call_cut", "the client left before a rollout was there")
            return told(opening.result(), _base_url(scope))
        finally:
            opening.cancel()
            leaving.cancel()

    async def _close(self, scope: Any, receive: Receive) -> dict[str, Any]:
        given = _parsed(_Close, await read_json(receive, _READ_SECONDS))
        if given.reward is not None and given.rewards:
            raise Refused(400, "invalid_value", "send reward, of the session, or rewards, of its branches", "rewards")
        rewards = given.rewards if given.reward is None else [given.reward]
        return asdict(self._outside.close(key_of(scope), rewards, given.metrics))

    async def _abandon(self, scope: Any, receive: Receive) -> dict[str, Any]:
        self._outside.abandon(key_of(scope), _parsed(_Abandon, await read_json(receive, _READ_SECONDS)).reason)
        return {}


def told(offer: Offer, base_url: str) -> dict[str, Any]:
    """The answer to a program that opened a session."""
    task = offer.task
    return {
        "key": offer.agent.key,
        "base_url": base_url,
        "task_id": task.task_id,
        "taskset": task.taskset,
        "row": task.raw,
        "rollout": offer.agent.rollout,
        "repeat_times": task.repeat_times,
        "evaluation": task.kind is TaskKind.EVALUATION,
        "limit_seconds": offer.limit_seconds,
    }


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _base_url(scope: Any) -> str:
    """The base URL by which the caller reached this application."""
    host = dict(scope["headers"]).get(b"host", b"").decode("latin-1") or "{}:{}".format(*scope["server"])
    return f"{scope['scheme']}://{host}/v1"


def _parsed(kind: type[_Given], body: dict[str, Any]) -> _Given:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(400, "invalid_value", f"{where}: {first['msg']}", where) from None
