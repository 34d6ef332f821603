"""HTTP of the endpoint and the gateway: bodies and keys of requests, errors in OpenAI's or Anthropic's form."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

LARGEST_BODY = 8 * 2**20  # bytes of a request

# Types of Anthropic's errors, by status; all others are invalid_request_error or api_error.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
}

App = Callable[[Any, Any, Any], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Refused(Exception):
    """A call that gets an error as its answer. `fails`: the session can no longer be trained on."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None, fails: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.fails = status, code, param, fails


async def read_json(receive: Receive, seconds: float) -> dict[str, Any]:
    """Read the body of a request, a JSON object. Raises Refused if it is wrong or not complete after `seconds`."""
    return parsed(await read_body(receive, seconds))


async def read_body(receive: Receive, seconds: float) -> bytes:
    """Read the body of a request. Raises Refused if it is too long or not complete after `seconds`."""
    parts, size, more = [], 0, True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "call_cut", "the client left before the request was complete", fails=True)
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size > LARGEST_BODY:
                    problem = f"the request has more than {LARGEST_BODY} bytes"
                    raise Refused(413, "request_too_large", problem, fails=True)
    except TimeoutError:
        problem = f"the request was not complete after {seconds:g} s"
        raise Refused(408, "request_timeout", problem, fails=True) from None
    return b"".join(parts)


def parsed(data: bytes) -> dict[str, Any]:
    """A body as a JSON object. Raises Refused if it is none."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "invalid_json", f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, "invalid_json", "the request must be a JSON object")
    return body


def key_of(scope: Any) -> str:
    """The key of a request: OpenAI's clients send `Authorization: Bearer`, Anthropic's `x-api-key`."""
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return str(key.strip())
    return str(headers.get(b"x-api-key", b"").decode("latin-1"))


def is_preflight(scope: Any) -> bool:
    """True for a browser's preflight request, which Starlette's CORSMiddleware answers without content."""
    names = {name for name, _ in scope.get("headers", ())}
    return scope.get("method") == "OPTIONS" and names >= {b"origin", b"access-control-request-method"}


async def send_json(send: Send, status: int, body: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    data = json.dumps(body).encode()
    about = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": about})
    await send({"type": "http.response.body", "body": data})


async def send_error(send: Send, refused: Refused, path: str = "") -> None:
    """Send an error in OpenAI's form, or in Anthropic's on its paths."""
    anthropic = path.startswith("/v1/messages")
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    if anthropic:
        kind = _ANTHROPIC_TYPES.get(refused.status, "api_error" if refused.status >= 500 else kind)
    error = {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}
    of_anthropic = {"type": "error"} if anthropic else {}
    challenge = [(b"www-authenticate", b"Bearer")] if refused.status == 401 else []
    await send_json(send, refused.status, {**of_anthropic, "error": error}, [(b"connection", b"close"), *challenge])
