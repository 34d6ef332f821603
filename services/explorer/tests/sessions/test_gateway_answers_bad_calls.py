"""What is wrong with a call is an error in OpenAI's form, and a session that cannot be whole fails with its cause."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from trinity.data.experience import SamplingParams, VersionSpan
from trinity.explorer.serving import endpoint
from trinity.explorer.serving.asgi import LARGEST_BODY, App
from trinity.explorer.sessions.gateway import Gateway
from trinity.explorer.sessions.in_process import InProcess
from trinity.explorer.sessions.session import CALL, Session, SessionFailed, Sessions
from trinity.explorer.types import Completion
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

ASKED: list[Any] = [{"role": "user", "content": "1+1"}]
CALLED = {"id": "a", "type": "function", "function": {"name": "launch", "arguments": "{}"}}


class Served:
    """A gateway on a port, before an application that answers every question with `2`, once it is let go."""

    def __init__(self, in_process: bool) -> None:
        self.in_process = in_process
        self.sessions = Sessions()
        self.go = asyncio.Event()
        self.go.set()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}/v1"
        routes = [Route("/v1/chat/completions", self.chat, methods=["POST"]), Route("/v1/models", self.models)]
        self.gateway = Gateway(Starlette(routes=routes), self.sessions, "policy", read_seconds=2.0)

    async def models(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        return JSONResponse({"object": "list", "data": []})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        call = CALL.get()
        assert call is not None
        call.place = call.session.tree.place([[1, 2, 3]], [])
        completion = Completion(np.array([7, 8], np.int32), np.zeros(2, np.float32), (VersionSpan(0, 0, 2),), "stop")
        if not body.get("stream"):
            while not self.go.is_set():
                await asyncio.sleep(0.01)
                if await request.is_disconnected():
                    return JSONResponse(None)  # as vLLM does
            call.sampled[0] = (completion, True)
            message = {"role": "assistant", "content": "2", **body.get("reply", {})}
            return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

        async def events() -> AsyncIterator[str]:
            if body.get("refused"):  # by the engine, whose errors come as events
                call.refused = True
                yield f"data: {json.dumps({'error': {'message': 'vLLM refuses it', 'code': 400}})}\n\n"
                return
            said = {"content": "2" * body.get("characters", 1)}
            for delta, finished in (*[(said, None)] * body.get("parts", 1), ({"content": ""}, "stop")):
                call.sampled[0] = (completion, True)
                yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': finished}]})}\n\n"
                await self.go.wait()
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def application(self) -> App:
        return self.gateway

    def open(self) -> tuple[Session, openai.AsyncOpenAI]:
        session, key = self.sessions.open(SamplingParams(temperature=0.7, stop=("end",)))
        transport = InProcess(self.application) if self.in_process else None
        http = openai.DefaultAsyncHttpxClient(transport=transport, verify=False)
        return session, openai.AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0, http_client=http)


@asynccontextmanager
async def serving(in_process: bool) -> AsyncIterator[Served]:
    made = Served(in_process)
    server = asyncio.create_task(endpoint.run(made.gateway, [made.listening]))
    yield made
    server.cancel()
    await asyncio.wait([server])


@pytest_asyncio.fixture(params=["http", "in process"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """OpenAI's client reaches it over HTTP, and in its own process."""
    async with serving(request.param == "in process") as made:
        yield made


@pytest_asyncio.fixture
async def listening() -> AsyncIterator[Served]:
    """For calls by hand."""
    async with serving(False) as made:
        yield made


async def ask(client: openai.AsyncOpenAI, messages: Any = ASKED, **options: Any) -> Any:
    return await client.chat.completions.create(model="gpt-4o", messages=messages, **options)


async def failure_of(session: Session) -> Exception:
    async with asyncio.timeout(60):
        while session.failure is None:
            await asyncio.sleep(0.01)
    return session.failure


async def test_a_call_is_filled_in_as_the_task_says_and_recorded(served: Served) -> None:
    session, client = served.open()
    await ask(client)
    await ask(client, temperature=1.0)
    assert (await client.models.list()).data == []
    first, second = served.requests
    assert (first["model"], first["temperature"], first["stop"]) == ("policy", 0.7, ["end"])
    assert second["temperature"] == 1.0
    assert ["authorization" in headers for headers in served.headers] == [False] * 3, "the key goes no further"
    assert len(session.finish(0, 1.0)) == 2


async def test_a_call_asks_for_no_more_tokens_than_the_task_gives(served: Served) -> None:
    _, client = served.open()
    most = SamplingParams().max_tokens
    await ask(client, max_tokens=most + 1, max_completion_tokens=5)
    (body,) = served.requests
    assert (body["max_tokens"], body["max_completion_tokens"]) == (most, 5)


@pytest.mark.parametrize(("choice", "strict"), [(None, []), ("auto", []), ({"type": "auto"}, []), ("required", ["f"])])
async def test_calls_that_the_policy_chooses_have_no_constraint(served: Served, choice: Any, strict: list[str]) -> None:
    """`strict` is set by the OpenAI Agents SDK, and vLLM would sample by a grammar."""
    _, client = served.open()
    tool = {"name": "f", "strict": True, "parameters": {"type": "object"}}
    body = {"tools": [{"type": "function", "function": tool}, {"type": "function", **tool}], "tool_choice": choice}
    await ask(client, extra_body=body)
    first, second = served.requests[0]["tools"]
    assert first["function"].items() >= {"name": "f", "parameters": {"type": "object"}}.items()
    assert [one["name"] for one in (first["function"], second) if "strict" in one] == strict * 2


@pytest.mark.parametrize("key", ["none", "session-", "session-x.y", "other", "forged"])
async def test_a_forged_key_is_a_401(listening: Served, key: str) -> None:
    session, client = listening.open()
    right = client.api_key
    sent = right[:-1] + ("a" if right[-1] != "a" else "b") if key == "forged" else key
    async with httpx.AsyncClient() as http:
        answer = await http.post(
            f"{listening.url}/chat/completions", headers={"Authorization": f"Bearer {sent}"}, json={}
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert session.failure is None, "what others send is no fault of the session"


async def test_a_closed_session_answers_no_more_and_ends_the_calls_that_run(served: Served) -> None:
    session, client = served.open()
    served.go.clear()
    open_call = asyncio.create_task(ask(client))
    async with asyncio.timeout(60):
        while not served.requests:
            await asyncio.sleep(0.01)
    served.sessions.close(session)
    for call in (open_call, asyncio.create_task(ask(client))):
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await asyncio.wait_for(call, 60)
        assert refused.value.code == "session_closed"


async def test_a_session_with_an_open_call_has_no_experiences(served: Served) -> None:
    session, client = served.open()
    await ask(client)
    served.go.clear()
    open_call = asyncio.create_task(ask(client))
    async with asyncio.timeout(60):
        while len(served.requests) < 2:
            await asyncio.sleep(0.01)
    with pytest.raises(SessionFailed, match="1 calls of the session were still open"):
        session.finish(0, 1.0)
    with pytest.raises(openai.APIError):
        await asyncio.wait_for(open_call, 60)


async def test_a_history_that_calls_a_tool_never_offered_fails_the_session(served: Served) -> None:
    session, client = served.open()
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(client, [*ASKED, {"role": "assistant", "tool_calls": [CALLED]}])
    assert (refused.value.code, refused.value.param) == ("unknown_tool", "messages[1].tool_calls")
    with pytest.raises(SessionFailed, match="'launch', a tool that the session was never offered"):
        session.finish(0, 1.0)
    with pytest.raises(openai.PermissionDeniedError) as failed:
        await ask(client)
    assert failed.value.code == "session_failed" and "launch" in str(failed.value)


async def test_a_tool_that_was_offered_before_may_be_in_the_history(served: Served) -> None:
    session, client = served.open()
    await ask(client, tools=[{"type": "function", "function": {"name": "launch"}}])
    await ask(client, [*ASKED, {"role": "assistant", "tool_calls": [CALLED]}])
    assert session.failure is None


async def test_a_tool_that_the_policy_invented_may_be_in_the_history(served: Served) -> None:
    session, client = served.open()
    reply = (await ask(client, extra_body={"reply": {"tool_calls": [CALLED]}})).choices[0].message
    told = {"role": "tool", "tool_call_id": "a", "content": "Error: there is no tool 'launch'"}
    await ask(client, [*ASKED, reply, told])
    assert session.failure is None


async def test_a_reply_as_openais_client_dumps_it_may_be_in_the_history(served: Served) -> None:
    session, client = served.open()
    reply = (await ask(client)).choices[0].message.model_dump()
    assert "audio" in reply
    await ask(client, [*ASKED, reply, *ASKED])
    assert session.failure is None


async def test_a_message_of_10_mb_is_a_413(served: Served) -> None:
    session, client = served.open()
    with pytest.raises(openai.APIStatusError) as refused:
        await ask(client, [{"role": "user", "content": "x" * 10_000_000}])
    assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")
    assert str(LARGEST_BODY) in str(await failure_of(session))
    assert not served.requests


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"messages": [], "temperature": NaN}', "invalid_json"),
        (b'{"messages": [], "temperature": 1e999}', "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "invalid_text"),
        (b'{"messages": [], "use_beam_search": true}', "unsupported_parameter"),
        (b'{"messages": [], "kv_transfer_params": {"prompt_token_ids": [1]}}', "unsupported_parameter"),
    ],
)
async def test_what_cannot_be_recorded_is_a_400(listening: Served, body: bytes, code: str) -> None:
    session, client = listening.open()
    async with httpx.AsyncClient() as http:
        headers = {"Authorization": f"Bearer {client.api_key}"}
        answer = await http.post(f"{listening.url}/chat/completions", headers=headers, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        other = await http.post(f"{listening.url}/completions", headers=headers, json={"prompt": "1"})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "unknown_url")
    await ask(client)
    assert len(session.finish(0, 1.0)) == 1, "the agent may go on"


async def test_a_client_that_sends_no_body_is_a_408(listening: Served) -> None:
    session, client = listening.open()
    reader, writer = await asyncio.open_connection(*listening.listening.getsockname())
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.api_key}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 408") and b'"code": "request_timeout"' in answer
    assert "not complete after 2 s" in str(await failure_of(session))
    writer.close()


async def test_a_client_that_takes_no_answer_fails_the_session(listening: Served) -> None:
    session, client = listening.open()
    _, writer = await asyncio.open_connection(*listening.listening.getsockname(), limit=1024)
    body = json.dumps({"messages": ASKED, "stream": True, "characters": 1_000_000, "parts": 50}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.api_key}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    assert "the client took nothing of an answer for 2 s" in str(await failure_of(session))
    assert not session.tree.turns
    writer.close()


async def test_a_stream_that_is_not_read_fails_the_session(served: Served) -> None:
    session, client = served.open()
    async with await ask(client, stream=True, extra_body={"characters": 1_000_000, "parts": 100}):
        assert "the client took nothing of an answer for 2 s" in str(await failure_of(session))


async def test_the_time_limit_of_a_client_is_its_own(served: Served) -> None:
    session, client = served.open()
    served.go.clear()
    with pytest.raises(openai.APITimeoutError):
        await ask(client, timeout=0.2)
    async with asyncio.timeout(60):
        while session.calls:
            await asyncio.sleep(0.01)
    assert "cut before its answer was complete" in str(session.failure)


async def test_a_call_that_is_cancelled_fails_the_session(served: Served) -> None:
    session, client = served.open()
    served.go.clear()
    call = asyncio.create_task(ask(client))
    async with asyncio.timeout(60):
        while not served.requests:
            await asyncio.sleep(0.01)
    call.cancel()
    assert "cut before its answer was complete" in str(await failure_of(session))


async def test_a_stream_comes_part_by_part(served: Served) -> None:
    _, client = served.open()
    served.go.clear()
    async with asyncio.timeout(60), await ask(client, stream=True) as stream:
        parts = aiter(stream)
        assert (await anext(parts)).choices[0].delta.content == "2"
        served.go.set()
        assert [part.choices[0].finish_reason async for part in parts] == ["stop"]


async def test_a_stream_that_vllm_refuses_leaves_the_session_open(served: Served) -> None:
    session, client = served.open()
    with pytest.raises(openai.APIError, match="vLLM refuses it"):
        async for _ in await ask(client, stream=True, extra_body={"refused": True}):
            pass
    await ask(client)
    assert session.failure is None and len(session.finish(0, 1.0)) == 1


async def test_a_stream_that_is_cut_fails_the_session(served: Served) -> None:
    session, client = served.open()
    served.go.clear()
    async with await ask(client, stream=True) as stream:
        await anext(aiter(stream))
    await client.close()
    assert "cut before its answer was complete" in str(await failure_of(session))
    assert not session.tree.turns


async def test_a_stream_that_is_left_after_its_last_reply_is_whole(served: Served) -> None:
    session, client = served.open()
    async for chunk in await ask(client, stream=True):
        if chunk.choices[0].finish_reason:
            break
    await client.close()
    async with asyncio.timeout(60):
        while session.calls:
            await asyncio.sleep(0.01)
    assert len(session.finish(0, 1.0)) == 1


@pytest.mark.parametrize("reward", [np.float32(0.5), np.array(0.5), np.array([0.5]), [np.float64(0.5)], (0.5,)])
async def test_a_reward_may_be_a_number_of_numpy(served: Served, reward: Any) -> None:
    session, client = served.open()
    await ask(client)
    (made,) = session.finish(0, reward)
    assert type(made.reward) is float and made.reward == 0.5


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e39, [1.0, 2.0], [], "1", "11", [None]])
async def test_a_wrong_reward_is_refused(served: Served, reward: Any) -> None:
    session, client = served.open()
    await ask(client)
    with pytest.raises(InvalidInput, match="reward"):
        session.finish(0, reward)


async def test_no_secret_is_shown(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    session, client = served.open()
    await ask(client)
    secret = client.api_key.partition(".")[2]
    assert secret not in repr(session) and secret not in repr(served.sessions.__dict__) and secret not in caplog.text


async def test_a_session_is_bounded_too(served: Served) -> None:
    session, client = served.open()
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="refers to itself by '#'"):
        await client.chat.completions.create(model="any", messages=ASKED, response_format=form)
    with pytest.raises(openai.BadRequestError, match="makes 257 completions"):
        await client.chat.completions.create(model="any", messages=ASKED, n=257)
    assert session.failure is None and not served.requests
    served.gateway._bounds.seconds = 0.2
    served.go.clear()
    with pytest.raises(openai.APIStatusError, match=r"longer than 0\.2 s") as refused:
        await client.chat.completions.create(model="any", messages=ASKED)
    assert refused.value.status_code == 408 and "request_timeout" in str(session.failure)
