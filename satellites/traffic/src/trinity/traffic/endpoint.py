"""Records plain calls of the endpoint, and takes their rewards: live traffic that the run learns from.

    POST /v1/chat/completions, ...       answered as before; the call is recorded as its reply ends
    POST /v1/rewards                     with the same key: the reward of a response, by its id
    DELETE /v1/chat/completions/<id>     with the same key: deletes the recording, as OpenAI's clients do

A call is recorded if the trainer could train its reply. Recording never fails a call, and no reply waits for it: the
disk of a busy NATS may take longer than a short reply. Rewards and deletions wait.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from trinity.data.experience import Experience, SamplingParams
from trinity.data.traffic import IS_CALL
from trinity.explorer.serving.asgi import App, Receive, Refused, Send, key_of, read_json, send_error, send_json
from trinity.explorer.serving.bounds import replayed
from trinity.explorer.sessions.gateway import Answer, check_recordable, defaults, written
from trinity.explorer.sessions.replies import READERS, Reader
from trinity.explorer.sessions.samples import Said
from trinity.explorer.sessions.session import CALL, Call, Session, SessionFailed
from trinity.runtime.errors import Conflict, InvalidInput, NotFound, TrinityError
from trinity.runtime.metrics import Counter
from trinity.traffic.calls import Calls

log = structlog.get_logger(__name__)

CALLS = Counter("trinity_explorer_calls_total", "Plain calls at the endpoint, and whether they were recorded", ["fate"])
REWARDS = Counter("trinity_explorer_call_rewards_total", "Rewards of recorded calls, and what was said", ["answer"])

_READ_SECONDS = 60.0
_REWARDS = "/v1/rewards"
_STATUSES: list[tuple[type[TrinityError], int, str]] = [
    (InvalidInput, 400, "invalid_value"),
    (NotFound, 404, "unknown_id"),
    (Conflict, 409, "already_rewarded"),
    (TrinityError, 503, "try_again"),
]


class _Reward(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: str
    reward: float


class Traffic:
    """`app` is the endpoint's application for plain calls, `sampling` what calls are sampled with by default."""

    def __init__(self, app: App, calls: Calls, sampling: SamplingParams) -> None:
        self._app, self._calls, self._sampling = app, calls, sampling
        self._said: set[str] = set()
        self._keeping: dict[str, asyncio.Task[None]] = {}  # by the response's id

    async def close(self) -> None:
        """Wait until all calls are stored, or failed to be."""
        await asyncio.gather(*self._keeping.values(), return_exceptions=True)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        method, path = (scope["method"], scope["path"]) if scope["type"] == "http" else ("", "")
        place, _, call_id = path.rpartition("/")
        try:
            if (method, path) == ("POST", _REWARDS):
                await self._reward(scope, receive, send)
            elif method == "DELETE" and place in READERS:
                await self._kept(call_id)
                await _answered(self._calls.forget(call_id, key_of(scope)))
                await send_json(send, 200, {"id": call_id, "object": "chat.completion.deleted", "deleted": True})
            elif method == "POST" and path in READERS:
                await self._record(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Refused as refused:
            await send_error(send, refused, path)

    async def _reward(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            try:
                given = _Reward.model_validate(await read_json(receive, _READ_SECONDS))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise Refused(400, "invalid_value", f"{where}: {first['msg']}", where) from None
            await self._kept(given.id)
            await _answered(self._calls.reward(given.id, key_of(scope), given.reward))
        except Refused as refused:
            REWARDS.labels(refused.code).inc()
            raise
        REWARDS.labels("stored").inc()
        await send_json(send, 200, given.model_dump())

    async def _record(self, scope: Any, receive: Receive, send: Send) -> None:
        body = await read_json(receive, _READ_SECONDS)
        body = {**body, **defaults(body, self._sampling)}
        body.pop("request_id", None)  # vLLM would take the response's id from it, or from the header
        data = written(body)
        dropped = (b"content-length", b"transfer-encoding", b"x-request-id")
        headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
        scope = {**scope, "headers": [*headers, (b"content-length", b"%d" % len(data))]}
        try:
            check_recordable(body)
            if body.get("n") not in (None, 1):
                raise Refused(400, "unsupported_parameter", f"n is {body['n']}, and an id has one reward", "n")
        except Refused as refused:
            self._passed("unsupported", str(refused))
            await self._app(scope, replayed(data, receive), send)
            return
        call, reader = Call(Session("", b"", self._sampling)), _Identified(READERS[scope["path"]]())
        CALL.set(call)
        keep = partial(self._start_keeping, reader, key_of(scope), call)
        answer = _Kept(call, reader, send, None, keep=keep, passed=partial(self._passed, "untrained"))
        await self._app(scope, replayed(data, receive), answer.send)

    def _start_keeping(self, reader: "_Identified", key: str, call: Call) -> None:
        keeping = self._keeping[reader.id] = asyncio.create_task(self._keep(reader, key, call))
        keeping.add_done_callback(lambda _: self._keeping.pop(reader.id, None))

    async def _kept(self, call_id: str) -> None:
        """Wait until a call that this explorer records is stored, or failed to be."""
        if call_id in self._keeping:
            await asyncio.wait([self._keeping[call_id]])

    async def _keep(self, reader: "_Identified", key: str, call: Call) -> None:
        if call.session.untrained:
            self._passed("untrained", "; ".join(sorted(call.session.untrained)))
            return
        try:
            (branch,) = call.session.tree.branches()
            experience: Experience = branch.experience(0, 0.0)
            if not IS_CALL.fullmatch(reader.id):
                raise InvalidInput("id", f"of the response is {reader.id[:100]!r}")
            await self._calls.keep(reader.id, key, experience)
        except InvalidInput as error:
            self._passed("untrained", str(error))
        except Exception as error:  # no caller awaits the task and would see it
            self._passed("lost", str(error) or repr(error))
        else:
            CALLS.labels("recorded").inc()

    def _passed(self, fate: str, reason: str) -> None:
        """Counts a call that is not recorded. Each fate is logged once, with its first reason."""
        CALLS.labels(fate).inc()
        if fate not in self._said:
            self._said.add(fate)
            log.warning("explorer.call.unrecorded", fate=fate, reason=reason)


async def _answered(work: Awaitable[None]) -> None:
    """Raises Refused for an error."""
    try:
        await work
    except TrinityError as error:
        status, code = next((status, code) for kind, status, code in _STATUSES if isinstance(error, kind))
        raise Refused(status, code, str(error), getattr(error, "field", None)) from None


@dataclass
class _Kept(Answer):
    """Begins to keep the call before the client has the end of its reply."""

    keep: Callable[[], None] = field(kw_only=True)
    passed: Callable[[str], None] = field(kw_only=True)
    kept: bool = False

    def _read(self, message: dict[str, Any]) -> None:
        try:
            super()._read(message)
        except SessionFailed as error:  # of a model whose prompts vLLM makes by itself
            if not self.kept:
                self.kept = True
                self.passed(str(error))

    async def _pass_on(self, message: dict[str, Any]) -> None:
        if self.call.complete and not self.kept:
            self.kept = True
            self.keep()
        await super()._pass_on(message)


class _Identified:
    """A reader that also finds the response's id."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self.id = reader, ""

    def whole(self, body: dict[str, Any]) -> Iterable[tuple[int, Said]]:
        self.id = str(body.get("id", ""))
        return self._reader.whole(body)

    def event(self, data: dict[str, Any]) -> Iterable[tuple[int, Said]]:
        within = data.get("response") or data.get("message") or data  # of /v1/responses, of /v1/messages
        self.id = self.id or str(within.get("id") or "")
        return self._reader.event(data)
