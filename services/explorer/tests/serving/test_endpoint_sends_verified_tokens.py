"""The OpenAI endpoint sends only tokens of loads that are known to be good."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from trinity.data.experience import SamplingParams
from trinity.explorer.engine.engine import Engine
from trinity.explorer.serving.endpoint import PooledClient
from trinity.explorer.sessions import recording
from trinity.explorer.sessions.recording import RecordingClient
from trinity.explorer.sessions.session import CALL, Call, Session
from trinity.explorer.types import EngineOptions
from trinity.explorer.weights.load_history import LoadHistory, WeightsWithdrawn

pytestmark = pytest.mark.core


class Vllm:
    """Streams what is put into `outputs`."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[str | Exception] = asyncio.Queue()
        self.salts: list[str] = []
        self.closed = False

    async def generate(self, prompt: dict[str, Any], sampling: Any = None) -> AsyncIterator[str]:
        self.salts.append(prompt["cache_salt"])
        try:
            while True:
                output = await self.outputs.get()
                if isinstance(output, Exception):
                    raise output
                yield output
        finally:
            self.closed = True


class Pool:
    def __init__(self) -> None:
        self.loads = LoadHistory()
        self.llm = Vllm()
        self.engines = [Engine(self.llm, EngineOptions("m", "cpu", 8))]
        self.prompts: list[Any] = []

    @asynccontextmanager
    async def engine_for(self, tokens: Any, sequences: int = 1) -> AsyncIterator[Engine]:
        self.prompts.append(tokens)
        yield self.engines[0]

    def adapter_of_call(self, _: Engine) -> str:
        return ""

    def load(self, version: int) -> int:
        """As EnginePool.load, at once."""
        serial = self.loads.begin(version)
        self.engines[0].serials.append(serial)
        return serial


@pytest.mark.parametrize(("session", "tried"), [(None, True), ("", True), ("agent", False)])
async def test_a_trial_chooses_for_plain_calls_alone(
    session: str | None, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session without a name stands for a plain call that is recorded."""
    pool: Any = Pool()
    asked: list[Engine] = []
    pool.adapter_of_call = lambda engine: asked.append(engine) or ""
    CALL.set(None if session is None else Call(Session(session, b"", SamplingParams(max_tokens=4))))
    monkeypatch.setattr(recording, "Recording", lambda *_: None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(RecordingClient(pool).generate({"prompt_token_ids": [1]})), 0.1)
    assert len(pool.llm.salts) == 1 and bool(asked) == tried


class Client:
    """Reads a response; `received` so far."""

    def __init__(self, pool: Any) -> None:
        self.received: list[str] = []
        self.task = asyncio.create_task(self._read(PooledClient(pool)))

    async def _read(self, client: PooledClient) -> None:
        async for output in client.generate({"prompt_token_ids": [5, 6, 7]}):
            self.received.append(output)

    async def until(self, received: list[str]) -> None:
        async with asyncio.timeout(10):
            while self.received != received:
                await asyncio.sleep(0.01)


async def test_tokens_of_a_pending_version_wait_for_its_canary() -> None:
    pool = Pool()
    client = Client(pool)
    pool.llm.outputs.put_nowait("old")
    await client.until(["old"])
    assert pool.prompts == [[5, 6, 7]], "the engine of a conversation is found by its tokens"
    serial = pool.load(1)
    pool.llm.outputs.put_nowait("new")
    await asyncio.sleep(0.1)
    assert client.received == ["old"], "its canary is still pending"
    pool.loads.pass_canary(serial)
    await asyncio.sleep(0.1)
    assert client.received == ["old"], "the sync service has not verified it"
    pool.loads.verify(1)
    await client.until(["old", "new"])
    client.task.cancel()


async def test_tokens_of_a_rejected_version_are_not_sent() -> None:
    pool = Pool()
    client = Client(pool)
    pool.load(1)
    pool.llm.outputs.put_nowait("wrong")
    await asyncio.sleep(0.1)
    pool.loads.reject([1], "was rejected")
    with pytest.raises(WeightsWithdrawn, match="version 1, which was rejected"):
        await asyncio.wait_for(client.task, 10)
    assert client.received == [] and pool.llm.closed, "vLLM works on it no longer"


async def test_a_request_waits_while_the_weights_are_known_to_be_wrong() -> None:
    pool = Pool()
    pool.loads.mark_bad(pool.load(1), "could not be loaded")
    client = Client(pool)
    pool.llm.outputs.put_nowait("good")
    await asyncio.sleep(0.1)
    assert not pool.llm.salts
    pool.loads.trust(pool.load(2))
    await client.until(["good"])
    assert pool.llm.salts == ["load2"]
    client.task.cancel()


@pytest.mark.parametrize(("error", "fails"), [(VLLMValidationError("no such token"), False), (OSError("gone"), True)])
async def test_what_vllm_refuses_leaves_its_session_open(
    error: Exception, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool: Any = Pool()
    session = Session("agent", b"", SamplingParams(max_tokens=4))
    call = Call(session)
    CALL.set(call)
    monkeypatch.setattr(recording, "Recording", lambda *_: None)
    pool.llm.outputs.put_nowait(error)
    with pytest.raises(type(error)):
        await asyncio.wait_for(anext(RecordingClient(pool).generate({"prompt_token_ids": [1]})), 10)
    assert ((session.failure is not None), call.refused) == (fails, not fails)
