"""Bounds of requests at the endpoint and the gateway: completions and time of each, and of each key; JSON schemas."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trinity.data.experience import LARGEST_NUMBER
from trinity.explorer.serving.asgi import App, Receive, Refused, Send, key_of, parsed, read_body, send_error

_READ_SECONDS = 60.0
_MOST = "explorer.request_completions"
_DEEPEST = 64  # levels of a schema; vLLM's compilers of grammars recurse
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Fields of a request that have a schema which sampling follows.
_SCHEMAS = (
    ("response_format", "json_schema", "schema"),
    ("text", "format", "schema"),
    ("structured_outputs", "json"),
    ("guided_json",),
)


@dataclass
class Bounds:
    """`most_completions`: of one request, and of all open requests of a key. `seconds`: of one request. `reward`:
    of a session, as Limits.reward."""

    most_completions: int = 256
    seconds: float = 1800.0
    reward: float = LARGEST_NUMBER
    _open: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def request(self, key: str, body: dict[str, Any]) -> Iterator[None]:
        """Counts a request of a key while it is answered. Raises Refused for one beyond the bounds."""
        count = self._completions(body)
        check_schemas(body)
        if self._open[key] + count > self.most_completions:
            problem = f"{self._open[key]} completions of this key are open, at most {self.most_completions} may be"
            raise Refused(429, "too_many_completions", f"{problem} ({_MOST}); wait for answers", "n")
        self._open[key] += count
        try:
            yield
        finally:
            self._open[key] -= count
            if not self._open[key]:
                del self._open[key]

    def _completions(self, body: dict[str, Any]) -> int:
        """The completions that a request makes: of each prompt in a list, n or best_of."""
        prompts = body.get("prompt")
        count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
        given = {name: body[name] for name in ("n", "best_of") if isinstance(body.get(name), int)}
        name = max(given, key=lambda name: given[name], default="prompt")
        made = count * max(1, given.get(name, 1))
        if made > self.most_completions:
            problem = (
                f"the request makes {made} completions, it may make {self.most_completions} ({_MOST}); lower {name}"
            )
            raise Refused(400, "too_many_completions", problem, name)
        return made


def check_schemas(body: dict[str, Any]) -> None:
    """Raises Refused for a JSON schema that refers to itself or is too deep: no grammar can be made of it."""
    for path in _SCHEMAS:
        found: Any = body
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        _check_schema(found, ".".join(path))
    if body.get("tool_choice") in (None, "auto", "none"):
        return  # calls are parsed, not forced
    tools = body.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        for name in ("parameters", "input_schema"):
            _check_schema(function.get(name) if isinstance(function, dict) else None, f"tools[{index}].{name}")


def _check_schema(schema: Any, place: str) -> None:
    def visit(part: Any, depth: int, within: frozenset[str]) -> None:
        if depth > _DEEPEST:
            problem = f"has more than {_DEEPEST} levels; send a flatter schema"
            raise Refused(400, "invalid_json_schema", f"{place} {problem}", place)
        if isinstance(part, list):
            for one in part:
                visit(one, depth + 1, within)
        if not isinstance(part, dict):
            return
        for name in _REFERENCES:
            reference = part.get(name)
            if isinstance(reference, str) and reference.startswith("#"):
                if reference in within or reference == "#":
                    problem = f"refers to itself by {reference!r:.100}; write the levels out that you need"
                    raise Refused(400, "invalid_json_schema", f"{place} {problem}", place)
                if reference not in seen:
                    visit(_resolved(schema, reference), depth + 1, within | {reference})
                    seen.add(reference)
        for name, one in part.items():
            if name not in ("$defs", "definitions", "enum", "const", "default", "examples"):
                visit(one, depth + 1, within)

    seen: set[str] = set()
    visit(schema, 0, frozenset())


def _resolved(schema: Any, reference: str) -> Any:
    """The part of a schema that a local reference names; None if there is none."""
    found = schema
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def bounded(app: App, bounds: Bounds) -> App:
    """An ASGI application whose requests keep within bounds. One that takes too long gets 408, or is cut."""

    async def answer(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        begun = False

        async def passed(message: dict[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            data = await read_body(receive, _READ_SECONDS)
            with bounds.request(key_of(scope), parsed(data) if data else {}):
                try:
                    async with asyncio.timeout(bounds.seconds) as limit:
                        await app(scope, replayed(data, receive), passed)
                except TimeoutError:
                    if begun or not limit.expired():
                        raise
                    raise Refused(408, "request_timeout", too_long(bounds.seconds)) from None
        except Refused as refused:
            await send_error(send, refused, scope["path"])

    return answer


def too_long(seconds: float) -> str:
    return f"the request took longer than {seconds:g} s (explorer.request_timeout); ask for fewer tokens"


def replayed(body: bytes, receive: Receive) -> Receive:
    """Receives a body that was read before, and then the client's further messages."""
    first: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> dict[str, Any]:
        return first.pop() if first else await receive()

    return received
