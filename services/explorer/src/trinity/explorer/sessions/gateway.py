"""The endpoint of agents' sessions: an ASGI application around vLLM's, which checks, completes and records each call.

Wrong calls get an error in OpenAI's form. A session fails if a call is cut, hangs or is too large, or if its history
calls tools that were never offered, since then its record is not complete.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import structlog

from trinity.data.experience import SamplingParams
from trinity.data.vision import ImageRules
from trinity.explorer.serving.asgi import App, Receive, Refused, Send, key_of, read_json, send_error
from trinity.explorer.serving.bounds import Bounds, replayed, too_long
from trinity.explorer.sessions.images import is_image, without_files
from trinity.explorer.sessions.replies import READERS, Events, Reader
from trinity.explorer.sessions.session import CALL, Call, Session, SessionFailed, Sessions

log = structlog.get_logger(__name__)

_READ_SECONDS = 60.0  # to send the body of a request, and to take each part of an answer
_MODELS = "/v1/models"
_CHAT = "/v1/chat/completions"
# vLLM's fields that change the prompt or its origin.
_REFUSED = (
    "add_generation_prompt", "background", "chat_template", "continue_final_message", "echo", "ec_transfer_params",
    "kv_transfer_params", "logprob_token_ids", "previous_input_messages", "previous_response_id", "priority",
    "prompt_embeds", "truncate_prompt_tokens", "use_beam_search",
)  # fmt: skip

_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
_NO_TEXT = ("image", "audio", "video", "embeds")  # in types and keys of message parts, in every protocol
_DEEPEST = 4  # levels: message, answer of a tool, its parts


class Gateway:
    """`app` is vLLM's, which knows the policy as `model`. Sessions may use any model name.

    images: rules by which the model reads images; None if it reads none.
    """

    def __init__(
        self,
        app: App,
        sessions: Sessions,
        model: str,
        read_seconds: float = _READ_SECONDS,
        bounds: Bounds | None = None,
        images: ImageRules | None = None,
    ) -> None:
        self._images = images
        self._app, self._sessions, self._model = app, sessions, model
        self._read_seconds, self._bounds = read_seconds, bounds or Bounds()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        session: Session | None = None
        try:
            session = self._session_of(scope)
            if scope["method"] == "GET" and scope["path"] == _MODELS:
                await self._app({**scope, "headers": _headers(scope, 0)}, receive, send)
                return
            if scope["method"] != "POST" or scope["path"] not in READERS:
                known = ", ".join(READERS)
                raise Refused(404, "unknown_url", f"a session answers {known} and {_MODELS}, not {scope['path']}")
            body = await read_json(receive, self._read_seconds)
            _check(body, session, self._images is not None and scope["path"] == _CHAT)
            if self._images is not None and isinstance(body.get("messages"), list):
                body, files = await asyncio.to_thread(without_files, body, self._images, session.images)
                session.images |= files
            given = {**body, "model": self._model, **defaults(body, session.sampling), **_free_tools(body)}
            data = written(given)
            with self._bounds.request(session.name, body):
                await self._answer(session, data, scope, receive, send)
        except Refused as refused:
            if session is not None and refused.fails:
                session.fail(SessionFailed(str(refused)))
            await send_error(send, refused, scope["path"])

    def _session_of(self, scope: Any) -> Session:
        session, closed = self._sessions.find(key_of(scope))
        if session is not None and session.failure is not None:
            raise Refused(403, "session_failed", f"the session has failed: {session.failure}")
        if closed:
            raise Refused(403, "session_closed", "the session is closed")
        if session is None:
            raise Refused(401, "invalid_api_key", "send the key of a session as `Authorization: Bearer <key>`")
        return session

    async def _answer(self, session: Session, data: bytes, scope: Any, receive: Receive, send: Send) -> None:
        """Forward a call to vLLM, in a task that ends with the session."""
        call = Call(session)
        answer = Answer(call, READERS[scope["path"]](), send, self._read_seconds)
        scope = {**scope, "headers": _headers(scope, len(data))}
        task = asyncio.create_task(_run(self._app, call, scope, replayed(data, receive), answer.send))
        session.calls.add(task)
        try:
            done, _ = await asyncio.wait([task], timeout=self._bounds.seconds)
            if not done:
                problem = too_long(self._bounds.seconds)
                session.fail(SessionFailed(problem))
                if answer.begun:
                    raise SessionFailed(problem)  # cuts the answer
                raise Refused(408, "request_timeout", problem)
        finally:
            task.cancel()
            session.calls.discard(task)
        if task.cancelled():
            if not answer.begun:
                raise Refused(403, "session_closed", "the session was closed before the call was answered")
            return
        error, whole = task.exception(), call.complete or call.refused
        if error is not None:
            session.fail(error if isinstance(error, Exception) else SessionFailed(repr(error)))
            if not answer.begun:
                raise Refused(500, "server_error", str(session.failure))
        elif answer.status is None or answer.status >= 500 or (answer.status == 200 and not whole):
            session.fail(SessionFailed(f"a call was cut before its answer was complete (HTTP {answer.status})"))


@dataclass
class Answer:
    """Forwards an answer to the client. Replies enter the tree before the client has all of them.

    `seconds`: the client's longest time to take a part; None: no limit.
    """

    call: Call
    reader: Reader
    to_client: Send
    seconds: float | None
    status: int | None = None
    streamed: bool = False
    begun: bool = False

    def __post_init__(self) -> None:
        self._body: list[bytes] = []
        self._events = Events()
        self._start: dict[str, Any] = {}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self._start = message["status"], message
            self.streamed = dict(message.get("headers", ())).get(b"content-type", b"").startswith(b"text/event-stream")
            return
        if message["type"] == "http.response.body" and self.status == 200:
            self._read(message)
        if not self.begun:
            self.begun = True
            await self._pass_on(self._start)
        await self._pass_on(message)

    def _read(self, message: dict[str, Any]) -> None:
        part = message.get("body", b"")
        if self.streamed:
            for event in self._events.feed(part):
                for index, said in self.reader.event(event):
                    self.call.reply(index, said)
            return
        self._body.append(part)
        if not message.get("more_body", False):
            body = json.loads(b"".join(self._body))
            for index, said in self.reader.whole(body) if body is not None else ():  # None: the client left
                self.call.reply(index, said)

    async def _pass_on(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self.seconds):
                await self.to_client(message)
        except TimeoutError:
            raise SessionFailed(f"the client took nothing of an answer for {self.seconds:g} s") from None


async def _run(app: App, call: Call, scope: Any, receive: Receive, send: Send) -> None:
    CALL.set(call)
    await app(scope, receive, send)


def written(body: dict[str, Any]) -> bytes:
    """A body as JSON. Raises Refused for NaN and 1e999, which Python reads and vLLM would sample by, and for half of a
    surrogate pair, for which vLLM's error names nothing."""
    try:
        return json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):x}"
        problem = f"the request has {half}, half of a surrogate pair; replace it (text.encode(errors='replace'))"
        raise Refused(400, "invalid_text", problem) from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, "invalid_json", f"the request is not JSON: {error}; send finite numbers") from None


def _headers(scope: Any, length: int) -> list[tuple[bytes, bytes]]:
    """Headers of the forwarded call, without the session's key."""
    dropped = (b"authorization", b"x-api-key", b"content-length", b"transfer-encoding", b"content-type")
    kept = [(name, value) for name, value in scope["headers"] if name not in dropped]
    return [*kept, (b"content-type", b"application/json"), (b"content-length", b"%d" % length)]


def check_recordable(body: dict[str, Any], images: bool = False) -> None:
    """Raises Refused for a call whose record would differ from its prompt or reply.

    images: a message may have OpenAI's image parts.
    """
    for name in _REFUSED:
        if body.get(name):
            raise Refused(400, "unsupported_parameter", f"{name} cannot be recorded; leave it out", name)
    for field in ("messages", "input"):
        if kind := _unreadable(body.get(field), images):
            more = f", or an image_url in {_CHAT}" if images else ""
            problem = f"holds a part with {kind!r:.100}, which is not recorded here; send only text{more}"
            raise Refused(400, "unsupported_content", problem, field)


def _check(body: dict[str, Any], session: Session, images: bool) -> None:
    check_recordable(body, images)
    session.tools.update(_names(body.get("tools")))
    for where, calls in _calls(body):
        for name in _names(calls):
            if name not in session.tools:
                problem = f"the history calls {name!r:.100}, a tool that the session was never offered"
                raise Refused(400, "unknown_tool", problem, where, fails=True)


def _calls(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(where, calls) of a history: in `tool_calls`, in blocks of a message (Anthropic), or in items (responses)."""
    for field in ("messages", "input"):
        for index, message in enumerate(_objects(body.get(field))):
            yield f"{field}[{index}].tool_calls", message.get("tool_calls")
            yield f"{field}[{index}].content", _objects(message.get("content"), "tool_use")
            yield f"{field}[{index}]", _objects([message], "function_call")


def _unreadable(values: Any, images: bool, depth: int = 0) -> str:
    """The type or key of the first part that is an image, sound or video, which vLLM would fetch from its URL; empty if
    there is none. Includes parts of a tool's answer. vLLM reads the keys of a part without a type, or with a uuid.
    images: a message may have OpenAI's image parts.
    """
    for part in _objects(values) if depth < _DEEPEST else ():
        if images and depth == 1 and is_image(part):
            continue
        for kind in (str(part.get("type") or ""), *(part if depth else ())):  # messages may have the key `audio`
            if kind == "uuid" or any(word in kind for word in _NO_TEXT):
                return kind
        for field in ("content", "output"):
            if kind := _unreadable(part.get(field), images, depth + 1):
                return kind
    return ""


def _names(functions: Any) -> Iterator[str]:
    """Names of tools or calls; both are [{function: {name}}] or [{name}]."""
    for one in _objects(functions):
        name = _objects([one.get("function", one)])
        if name and isinstance(name[0].get("name"), str):
            yield name[0]["name"]


def _objects(values: Any, kind: str = "") -> list[dict[str, Any]]:
    """The objects in a list, only those of type `kind` if it is given."""
    found = [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
    return [value for value in found if not kind or value.get("type") == kind]


def _free_tools(body: dict[str, Any]) -> dict[str, Any]:
    """The tools without `strict`, by which vLLM would constrain calls that the policy chooses freely. Some clients set
    it by default, and nothing of their sessions could be trained."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    chosen = choice.get("type") if isinstance(choice, dict) else choice
    if not isinstance(tools, list) or chosen not in (None, "auto"):
        return {}
    return {"tools": [_without_strict(tool) for tool in tools]}


def _without_strict(tool: Any) -> Any:
    """Tools are {function: {strict}} or {strict}."""
    if not isinstance(tool, dict):
        return tool
    kept = {name: value for name, value in tool.items() if name != "strict"}
    return {**kept, "function": _without_strict(kept["function"])} if "function" in kept else kept


def defaults(body: dict[str, Any], task: SamplingParams) -> dict[str, Any]:
    """The task's sampling parameters that the request lacks, and its bound for numbers of tokens beyond it."""
    values: dict[str, Any] = {"temperature": task.temperature, "top_p": task.top_p}
    if task.top_k > 0:
        values["top_k"] = task.top_k
    if task.repetition_penalty != 1:
        values["repetition_penalty"] = task.repetition_penalty
    if task.min_tokens:
        values["min_tokens"] = task.min_tokens
    if task.stop:
        values["stop"] = values["stop_sequences"] = list(task.stop)
    lacking = {name: value for name, value in values.items() if body.get(name) is None}
    given = {name: body[name] for name in _LENGTHS if isinstance(body.get(name), int)}
    return lacking | {name: task.max_tokens for name, length in given.items() if length > task.max_tokens}
