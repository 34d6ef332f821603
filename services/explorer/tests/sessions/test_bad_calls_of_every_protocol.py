"""Bad calls in each protocol of a session: an error in the protocol's own form, and a session that fails with it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from trinity.data.experience import SamplingParams
from trinity.explorer.serving import endpoint
from trinity.explorer.sessions.gateway import Gateway
from trinity.explorer.sessions.session import Session, SessionFailed, Sessions

pytestmark = pytest.mark.core

ASKED = {"role": "user", "content": "1+1"}
CALLED: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "launch", "arguments": "{}"}}],
    },
    "/responses": {"type": "function_call", "call_id": "a", "name": "launch", "arguments": "{}"},
    "/messages": {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "launch", "input": {}}]},
}
TYPES = {401: "authentication_error", 403: "permission_error", 413: "request_too_large", 408: "timeout_error"}


class Protocol:
    """A session, and calls of it in one protocol, before an application whose streams do not end."""

    def __init__(self, path: str) -> None:
        self.path, self.sessions = path, Sessions()
        self.session, self.key = self.sessions.open(SamplingParams())
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = self.listening.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}/v1"
        app = Starlette(routes=[Route(f"/v1{path}", self.answer, methods=["POST"])])
        self.gateway = Gateway(app, self.sessions, "policy", read_seconds=1.0)

    async def answer(self, request: Request) -> Response:
        parts = (await request.json()).get("parts", 1)

        async def events() -> AsyncIterator[str]:
            for _ in range(parts):
                yield f"event: x\ndata: {json.dumps({'type': 'x', 'filler': 'x' * 1_000_000})}\n\n"
            await asyncio.Event().wait()

        return StreamingResponse(events(), media_type="text/event-stream")

    def body(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        history = "input" if self.path == "/responses" else "messages"
        return {"model": "any", "max_tokens": 8, history: [ASKED, *messages], **fields}

    def headers(self, key: str) -> dict[str, str]:
        return {"x-api-key": key} if self.path == "/messages" else {"Authorization": f"Bearer {key}"}

    async def post(self, body: dict[str, Any], key: str = "") -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as http:
            return await http.post(f"{self.url}{self.path}", headers=self.headers(key or self.key), json=body)

    async def open_raw(self, content: bytes, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address, limit=1024)
        headers = {**self.headers(self.key), "Content-Type": "application/json", "Content-Length": str(length)}
        head = "".join(f"{name}: {value}\r\n" for name, value in {"Host": "x", **headers}.items())
        writer.write(f"POST /v1{self.path} HTTP/1.1\r\n{head}\r\n".encode() + content)
        return reader, writer

    def check(self, answer: httpx.Response, status: int, code: str) -> str:
        """The answer's error, in the protocol's form; returns its message."""
        told = answer.json()
        assert (answer.status_code, told["error"]["code"]) == (status, code), answer.text
        if self.path == "/messages":
            assert (told["type"], told["error"]["type"]) == ("error", TYPES.get(status, "invalid_request_error"))
        else:
            assert "type" not in told and told["error"]["type"] == "invalid_request_error"
        return str(told["error"]["message"])


@pytest_asyncio.fixture(params=[*CALLED])
async def protocol(request: pytest.FixtureRequest) -> AsyncIterator[Protocol]:
    made = Protocol(request.param)
    server = asyncio.create_task(endpoint.run(made.gateway, [made.listening]))
    yield made
    server.cancel()
    await asyncio.wait([server])


async def failure_of(session: Session) -> str:
    async with asyncio.timeout(60):
        while session.failure is None:
            await asyncio.sleep(0.01)
    with pytest.raises(SessionFailed):  # a session that failed is never trained
        session.finish(0, 1.0)
    return str(session.failure)


async def test_a_forged_key(protocol: Protocol) -> None:
    forged = protocol.key[:-1] + ("a" if protocol.key[-1] != "a" else "b")
    for key in (forged, "none"):
        protocol.check(await protocol.post(protocol.body(), key), 401, "invalid_api_key")
    assert protocol.session.failure is None


async def test_a_closed_session(protocol: Protocol) -> None:
    protocol.sessions.close(protocol.session)
    assert "closed" in protocol.check(await protocol.post(protocol.body()), 403, "session_closed")


async def test_a_history_that_calls_a_tool_never_offered(protocol: Protocol) -> None:
    answer = await protocol.post(protocol.body(CALLED[protocol.path]))
    assert "'launch'" in protocol.check(answer, 400, "unknown_tool")
    assert "'launch', a tool that the session was never offered" in await failure_of(protocol.session)
    assert "launch" in protocol.check(await protocol.post(protocol.body()), 403, "session_failed")


async def test_parts_that_are_no_text(protocol: Protocol) -> None:
    """Else vLLM fetches the address, and the group is refused only when it is stored."""
    image = {
        "/chat/completions": {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}},
        "/responses": {"type": "input_image", "image_url": "http://127.0.0.1:1/a.png"},
        "/messages": {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]},
    }[protocol.path]
    answer = await protocol.post(protocol.body({"role": "user", "content": [{"type": "text", "text": "?"}, image]}))
    assert "image" in protocol.check(answer, 400, "unsupported_content")
    assert protocol.session.failure is None, "the agent may ask otherwise"


@pytest.mark.parametrize(
    "part",
    [
        {"image_url": {"url": "http://127.0.0.1:1/a.png"}},
        {"audio_url": None},
        {"prompt_embeds": "AA=="},
        {"type": "text", "text": "?", "uuid": "a"},
        {"type": "prompt_embeds", "data": "AA=="},
    ],
)
async def test_parts_that_vllm_knows_by_a_key(protocol: Protocol, part: dict[str, Any]) -> None:
    answer = await protocol.post(protocol.body({"role": "user", "content": [{"type": "text", "text": "?"}, part]}))
    told = protocol.check(answer, 400, "unsupported_content")
    assert [key for key in (*part, part.get("type")) if repr(key) in told]


async def test_a_message_of_10_mb(protocol: Protocol) -> None:
    answer = await protocol.post(protocol.body({"role": "user", "content": "x" * 10_000_000}))
    assert "bytes" in protocol.check(answer, 413, "request_too_large")
    assert "bytes" in await failure_of(protocol.session)


async def test_a_client_that_stops_in_its_request(protocol: Protocol) -> None:
    reader, writer = await protocol.open_raw(b"{", 100)
    answer = await asyncio.wait_for(reader.read(), 60)
    head, _, content = answer.partition(b"\r\n\r\n")
    protocol.check(httpx.Response(int(head.split()[1]), content=content), 408, "request_timeout")
    assert "not complete after 1 s" in await failure_of(protocol.session)
    writer.close()


async def test_a_client_that_leaves_in_its_request(protocol: Protocol) -> None:
    _, writer = await protocol.open_raw(b"{", 100)
    writer.close()
    assert "left before the request was complete" in await failure_of(protocol.session)


async def test_a_stream_that_is_cut(protocol: Protocol) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        headers, body = protocol.headers(protocol.key), protocol.body(stream=True)
        async with http.stream("POST", f"{protocol.url}{protocol.path}", headers=headers, json=body) as answer:
            await anext(answer.aiter_bytes(1000))
    assert "cut before its answer was complete" in await failure_of(protocol.session)
    assert not protocol.session.tree.turns


async def test_a_client_that_takes_no_answer(protocol: Protocol) -> None:
    body = json.dumps(protocol.body(stream=True, parts=50)).encode()
    _, writer = await protocol.open_raw(body, len(body))
    assert "the client took nothing of an answer for 1 s" in await failure_of(protocol.session)
    assert not protocol.session.tree.turns
    writer.close()


async def test_the_clients_of_both_makers_name_the_error(protocol: Protocol) -> None:
    root = protocol.url.removesuffix("/v1")
    if protocol.path == "/messages":
        client = anthropic.AsyncAnthropic(base_url=root, api_key="forged", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError, match="key of a session"):
            await client.messages.create(model="any", max_tokens=8, messages=[{"role": "user", "content": "1+1"}])
        return
    asking = openai.AsyncOpenAI(base_url=protocol.url, api_key="forged", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="key of a session"):
        await asking.post(protocol.path, body=protocol.body(), cast_to=object)
