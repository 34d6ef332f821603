"""Plain calls are stored as their reply ends, and what a client says of one reaches no other client's call."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
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

from support.fakes.data.experience import make_task
from support.servers.nats import NatsServer
from trinity.buffer.state.streams import traffic_spec
from trinity.config.schema.explorer import TrafficConfig
from trinity.data.experience import Group, Limits, SamplingParams, VersionSpan
from trinity.data.wire import decode_reward
from trinity.explorer import service
from trinity.explorer.engine.auxiliary import AuxiliaryModels
from trinity.explorer.environments.client import EnvironmentClient
from trinity.explorer.rollout import attempt
from trinity.explorer.rollout.toolbox import ExplorerTools
from trinity.explorer.serving import endpoint
from trinity.explorer.serving.bounds import Bounds
from trinity.explorer.sessions import recording
from trinity.explorer.sessions.server import AgentGateway, OpenTo
from trinity.explorer.sessions.session import CALL
from trinity.explorer.types import Completion
from trinity.runtime.broker import Broker, connect, ensure_streams, on_subject
from trinity.runtime.names import RunNames
from trinity.runtime.process import free_port
from trinity.runtime.trust.keys import KeyFile
from trinity.sdk import CallRefused, delete_call, reward_call
from trinity.traffic import calls
from trinity.traffic import endpoint as traffic
from trinity.traffic.calls import Calls

pytestmark = pytest.mark.core

KEY, OTHER = "key-of-a-client", "key-of-another"
ASKED: list[Any] = [{"role": "user", "content": "1+1"}]
RUN = RunNames("traffic-of-tests")
SAMPLING = SamplingParams(max_tokens=8)
LIMITS = Limits(tokens=64, reward=10.0)


@dataclass
class Vllm:
    """Answers as vLLM's application does: it notes what was sampled, and names each response."""

    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    before_the_end: Callable[[], Any] | None = None
    renders: bool = True  # its prompts pass the recorder

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        self.headers += request.headers.keys()
        call, name = CALL.get(), f"chatcmpl-{len(self.seen)}"
        if call is not None and self.renders:
            sampling = SimpleNamespace(
                temperature=body.get("temperature", 1), top_p=body.get("top_p", 1), top_k=0, repetition_penalty=1
            )
            reason = recording.untrained_reason(sampling, call.session.sampling)
            call.session.untrained.update([reason] if reason else [])
            call.place = call.session.tree.place([[1, 2]], [])
            spans = VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)
            made = Completion(np.array([7, 8], np.int32), np.full(2, -0.5, np.float32), spans, "stop")
            call.sampled[0] = (made, not reason)
        if not body.get("stream"):
            message = {"role": "assistant", "content": "2"}
            return JSONResponse({"id": name, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

        async def events() -> AsyncIterator[str]:
            for delta, reason in (({"content": "2"}, None), ({}, "stop")):
                choice = {"index": 0, "delta": delta, "finish_reason": reason}
                yield f"data: {json.dumps({'id': name, 'choices': [choice]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


class Explorer:
    """The parts of an explorer that calls need, on a real NATS."""

    def __init__(self, folder: Path, broker: Broker, name: str) -> None:
        (folder / "keys").write_text(f"{KEY}\n{OTHER}\n")
        listen = f"127.0.0.1:{free_port()}"
        self.url = f"http://{listen}/v1"
        unused = dict.fromkeys(("prompt", "next_turn", "placed", "tokens", "observed"))
        said = dict.fromkeys(("text", "reply"), lambda ids: str(list(ids)))
        tokenizer: Any = SimpleNamespace(model_path="", **unused, **said)
        open_to = OpenTo(listen, KeyFile(folder / "keys", "keys"), "sums", SAMPLING)
        pool: Any = SimpleNamespace()
        self.gateway = AgentGateway(pool, "model", "", False, open_to=open_to, bounds=Bounds(reward=10.0))
        nowhere = EnvironmentClient("127.0.0.1:1")
        self.tools = ExplorerTools(pool, tokenizer, nowhere, AuxiliaryModels({}), 100, 100, self.gateway)
        self.calls = self.tools.calls = self.gateway.calls = Calls(broker, RUN, name, LIMITS)
        self.gateway.start()

    async def chat(self, key: str = KEY, **options: Any) -> Any:
        async with openai.AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0) as client:
            return await client.chat.completions.create(**{"model": "any", "messages": ASKED, **options})

    async def reward(self, call: str, value: float = 1.0, key: str = KEY) -> str:
        """Returns "" or the reason of a refusal."""
        try:
            await asyncio.to_thread(reward_call, self.url, key, call, value)
        except CallRefused as refused:
            return f"{refused.status} {refused.reason}"
        return ""


@pytest_asyncio.fixture
async def broker(nats_server: NatsServer) -> AsyncIterator[Broker]:
    async with await connect(nats_server.url, "tests") as connected:
        await ensure_streams(connected, [traffic_spec(RUN, TrafficConfig(keep_mib=1), 1)])
        yield connected


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    made = Vllm()

    async def application(*_: Any) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", made.answer, methods=["POST"])])

    monkeypatch.setattr(endpoint, "application", application)
    return made


@pytest_asyncio.fixture
async def explorer(tmp_path: Path, broker: Broker, vllm: Vllm) -> AsyncIterator[Explorer]:
    made = Explorer(tmp_path, broker, "one")
    yield made
    await made.tools.close()


async def stored(broker: Broker) -> list[str]:
    """Subjects of the stream, by their last two parts."""
    found = on_subject(broker, RUN.traffic_stream, RUN.subjects("traffic"))
    return [".".join(message.subject.split(".")[3:5]) async for message in found]


@pytest.fixture
def late(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Event]:
    """Until it is set, no call is stored."""
    stores, publish = asyncio.Event(), broker.publish

    async def publish_late(subject: str, *args: Any, **options: Any) -> Any:
        if ".call." in subject:
            await stores.wait()
        return await publish(subject, *args, **options)

    monkeypatch.setattr(broker, "publish", publish_late)
    yield stores
    stores.set()


async def test_a_reply_does_not_wait_for_its_record_and_its_reward_does(
    explorer: Explorer, broker: Broker, late: asyncio.Event
) -> None:
    whole = await explorer.chat()
    async with openai.AsyncOpenAI(base_url=explorer.url, api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(model="any", messages=ASKED, stream=True)
        streamed = [chunk async for chunk in stream][-1]
    rewards = [asyncio.create_task(explorer.reward(done.id)) for done in (whole, streamed)]
    await asyncio.sleep(calls._KEEP_SECONDS + 0.5)
    assert await stored(broker) == [] and not any(one.done() for one in rewards)
    late.set()
    assert await asyncio.gather(*rewards) == ["", ""]


async def test_a_reward_waits_for_a_record_of_another_explorer(
    explorer: Explorer, broker: Broker, tmp_path: Path, late: asyncio.Event
) -> None:
    done = await explorer.chat()
    other = Explorer(tmp_path, broker, "other")
    try:
        reward = asyncio.create_task(other.reward(done.id))
        await asyncio.sleep(0.5)
        assert await stored(broker) == [] and not reward.done()
        late.set()
        assert await reward == ""
    finally:
        await other.tools.close()


async def test_an_explorer_that_ends_stores_its_calls_first(
    explorer: Explorer, broker: Broker, late: asyncio.Event
) -> None:
    done = await explorer.chat()
    closing = asyncio.create_task(explorer.gateway.close())
    await asyncio.sleep(1.0)
    assert not closing.done()
    late.set()
    await closing
    assert await stored(broker) == [f"call.{done.id}"]


async def test_the_explorer_leaves_nats_after_its_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    @asynccontextmanager
    async def broker() -> AsyncIterator[None]:
        yield
        closed.append("nats")

    async def connect(*_: Any) -> Any:
        return broker()

    async def close() -> None:
        closed.append("tools")

    async def nothing(*_: Any) -> Any:
        return SimpleNamespace(gateway=None, close=close)

    monkeypatch.setattr(service, "connect", connect)
    one: Any = object.__new__(service.ExplorerService)
    one._running = SimpleNamespace(explorer_id="explorer-0", progress=None)
    one._settings, one._records, one._leases, one._run = SimpleNamespace(nats_url=""), False, None, nothing
    one._build = SimpleNamespace(tools=nothing, **dict.fromkeys(("older", "calls", "loop"), lambda *_: None))
    follower = SimpleNamespace(run=lambda: None, gates=SimpleNamespace(wait_for_step=lambda _: None))
    await one._explore(follower, *[None] * 5)
    assert closed == ["tools", "nats"]


async def test_a_call_whose_record_fails_counts_as_lost(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def keep(*_: Any) -> None:
        raise RuntimeError("of no kind that is expected")

    monkeypatch.setattr(Calls, "keep", keep)
    before = traffic.CALLS.labels("lost")._value.get()
    await explorer.chat()
    await explorer.gateway.close()
    assert traffic.CALLS.labels("lost")._value.get() == before + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_was_not_recorded_is_answered_all_the_same(
    explorer: Explorer, broker: Broker, vllm: Vllm, stream: bool
) -> None:
    vllm.renders = False
    async with openai.AsyncOpenAI(base_url=explorer.url, api_key=KEY, max_retries=0) as client:
        answer = await client.chat.completions.create(model="any", messages=ASKED, stream=stream)
        last = [chunk async for chunk in answer][-1] if stream else answer
    assert last.choices[0].finish_reason == "stop"
    assert await stored(broker) == []


async def test_a_reward_at_another_explorer_makes_experience_of_the_call(
    explorer: Explorer, broker: Broker, tmp_path: Path
) -> None:
    done = await explorer.chat()
    other = Explorer(tmp_path, broker, "other")
    try:
        assert await other.reward(done.id, 0.25) == ""
        entry = await broker.last(RUN.traffic_stream, RUN.call_reward(done.id))
        reward = decode_reward(entry.data, LIMITS)
        assert (reward.id, reward.reward, reward.oldest_version, reward.newest_version) == (done.id, 0.25, 3, 4)
        row = json.dumps({"id": done.id, "reward": 0.25})
        task = make_task(task_id=f"traffic/{done.id}", workflow="traffic_workflow", repeat_times=1, row_json=row)
        group = await attempt.explore(task, 1, "other", other.tools, LIMITS)
        assert isinstance(group, Group), group
        (made,) = group.experiences
        assert (made.token_ids.tolist(), made.prompt_length, made.reward) == ([1, 2, 7, 8], 2, 0.25)
        assert made.logprobs.tolist() == [-0.5, -0.5] and made.action_mask.all()
        assert made.version_spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))
    finally:
        await other.tools.close()


async def test_wrong_rewards_are_refused_and_stored_nowhere(explorer: Explorer, broker: Broker) -> None:
    call = (await explorer.chat()).id
    assert await explorer.reward("chatcmpl-never") == "404 unknown_id"
    assert await explorer.reward("no.token > of a subject*") == "404 unknown_id"
    assert await explorer.reward(call, key=OTHER) == "404 unknown_id", "another client's"
    assert await explorer.reward(call, 11.0) == "400 invalid_value"
    assert await explorer.reward(call, key="no key") == "401 invalid_api_key"
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as http:
        for body in (f'{{"id": "{call}", "reward": NaN}}', '{"id": 1, "reward": 1}', f'{{"id": "{call}"}}', "[]"):
            answer = await http.post(f"{explorer.url}/rewards", content=body)
            assert (answer.status_code, "error" in answer.json()) == (400, True), body
    assert await stored(broker) == [f"call.{call}"]
    answers = await asyncio.gather(*(explorer.reward(call, value) for value in (0.0, 1.0)))
    assert sorted(answers) == ["", "409 already_rewarded"], "the first of two at the same time"
    assert await explorer.reward(call, 1.0) == "409 already_rewarded"
    assert await stored(broker) == [f"call.{call}", f"reward.{call}"]


async def test_a_deleted_call_is_gone_with_its_reward(explorer: Explorer, broker: Broker) -> None:
    kept, gone = (await explorer.chat()).id, (await explorer.chat()).id
    assert await explorer.reward(gone) == ""
    async with openai.AsyncOpenAI(base_url=explorer.url, api_key=OTHER, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.delete(gone)
    async with openai.AsyncOpenAI(base_url=explorer.url, api_key=KEY, max_retries=0) as client:
        assert (await client.chat.completions.delete(gone)).deleted
    assert await stored(broker) == [f"call.{kept}"]
    assert await explorer.reward(gone) == "404 unknown_id"
    await asyncio.to_thread(delete_call, explorer.url, KEY, kept)
    assert await stored(broker) == []
    task = make_task(workflow="traffic_workflow", row_json=json.dumps({"id": gone, "reward": 1.0}))
    failure = await attempt.explore(replace(task, repeat_times=1), 1, "one", explorer.tools, LIMITS)
    assert "no recorded call" in getattr(failure, "error", ""), failure


async def test_replies_that_no_trainer_could_take_are_answered_and_not_stored(
    explorer: Explorer, broker: Broker, vllm: Vllm
) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    for options in ({"temperature": 0.5}, {"n": 2}, {"messages": image}, {"extra_body": {"echo": True}}):
        assert (await explorer.chat(**options)).choices[0].message.content == "2"
    assert await stored(broker) == []
    assert await explorer.reward("chatcmpl-1") == "404 unknown_id"
    assert vllm.seen[1]["temperature"] == 1.0, "the run's, where the client names none"


async def test_no_client_chooses_an_id_and_no_outage_fails_a_call(
    explorer: Explorer, broker: Broker, vllm: Vllm
) -> None:
    await explorer.chat(extra_headers={"X-Request-Id": "mine"}, extra_body={"request_id": "mine"})
    assert "request_id" not in vllm.seen[0] and "x-request-id" not in vllm.headers
    await broker.js.delete_stream(RUN.traffic_stream)
    done = await explorer.chat()
    assert done.choices[0].message.content == "2"
