"""Auxiliary models behind an HTTP server: judges and teachers by OpenAI's API, and each refusal in one sentence."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from trinity.config.schema.explorer import AuxiliaryModelConfig
from trinity.data.experience import SamplingParams
from trinity.explorer.engine.auxiliary import AuxiliaryModels
from trinity.explorer.types import EngineOptions
from trinity.runtime.errors import InvalidInput, Unavailable

pytestmark = pytest.mark.core

KEY = "key-that-no-log-may-show"
ASK = [{"role": "user", "content": "1+1"}]
POLICY = EngineOptions(model="none", device="cpu", max_model_len=256)


class Server:
    """Writes `a reply` n times, and gives prompt_logprobs as vLLM does: -token / 100."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.teaches, self.replies, self.status, self.wait, self.most = True, None, 200, 0.0, 20

    @asynccontextmanager
    async def at(self) -> AsyncIterator[str]:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        await asyncio.sleep(self.wait)
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        if self.status != 200:
            return web.json_response({"error": {"message": "too long for this model"}}, status=self.status)
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "owner/judge", "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        count = self.asked[-1]["n"] if self.replies is None else self.replies
        choices = [{"index": i, "message": {"role": "assistant", "content": f"a reply {i}"}} for i in range(count)]
        return web.json_response({"id": "1", "object": "chat.completion", "choices": choices})

    async def _complete(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        more = {str(900 + n): {"logprob": -5.0 - n} for n in range(min(self.most, self.asked[-1]["prompt_logprobs"]))}
        given = [None, *({**more, str(t): {"logprob": -t / 100}} for t in self.asked[-1]["prompt"][1:])]
        choice = {"index": 0, "text": "x", **({"prompt_logprobs": given} if self.teaches else {})}
        return web.json_response({"id": "1", "object": "text_completion", "choices": [choice]})


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Server, str]]:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = Server()
    async with server.at() as url:
        yield server, url


def model(url: str, path: str = "owner/judge", thinking: bool | None = None, **more: Any) -> AuxiliaryModelConfig:
    external = {"base_url": url, "api_key_env": "JUDGE_KEY", **more}
    given = {"model_path": path, "name": "judge", "enable_thinking": thinking, "external_model": external}
    return AuxiliaryModelConfig.model_validate(given)


async def start(config: AuxiliaryModelConfig, teachers: set[str] | None = None) -> AuxiliaryModels:
    return await AuxiliaryModels.start([config], POLICY, [], teachers or set())


async def test_a_judge_elsewhere_is_asked_with_the_sampling_and_the_key(
    served: tuple[Server, str], caplog: pytest.LogCaptureFixture
) -> None:
    server, url = served
    caplog.set_level(logging.DEBUG)
    models = await start(model(url, thinking=False))
    assert models.judges == ["judge"]
    sampling = SamplingParams(n=2, temperature=0.5, max_tokens=7, stop=("END",), top_k=3)
    assert await models.judge().chat(ASK, sampling) == ["a reply 0", "a reply 1"]
    await models.check()
    models.close()
    assert server.asked == [
        {"model": "owner/judge", "messages": ASK, "n": 2, "temperature": 0.5, "top_p": 1.0, "max_tokens": 7,
         "stop": ["END"], "top_k": 3, "chat_template_kwargs": {"enable_thinking": False}}
    ]  # fmt: skip
    assert KEY not in caplog.text


async def test_a_teacher_elsewhere_gives_the_log_probabilities_after_the_prompt(served: tuple[Server, str]) -> None:
    server, url = served
    models = await start(model(url), {""})
    found = await models.judge("judge").teach([5, 6, 7, 8], 2)
    assert found.logprobs.dtype == "float32"
    assert found.logprobs.tolist() == pytest.approx([-0.07, -0.08])
    assert found.top is None
    assert [one["prompt"] for one in server.asked] == [[1, 2], [5, 6, 7, 8]]
    assert server.asked[1]["temperature"] == 1.0


async def test_a_teacher_elsewhere_gives_its_likeliest_tokens_of_each_place(served: tuple[Server, str]) -> None:
    server, url = served
    models = await AuxiliaryModels.start([model(url)], replace(POLICY, top=2), [], {""})
    assert [one["prompt_logprobs"] for one in server.asked] == [2], "it is tried as it will be asked"
    found = await models.judge("judge").teach([5, 6, 7, 700], 2, 2)
    assert found.logprobs.tolist() == pytest.approx([-0.07, -7.0])
    assert found.top is not None and (found.top.ids.dtype, found.top.logprobs.dtype) == ("int32", "float32")
    assert found.top.ids.tolist() == [[7, 900], [900, 901]]
    assert found.top.logprobs.tolist() == [[pytest.approx(-0.07), -5.0], [-5.0, -6.0]]
    empty = await models.judge("judge").teach([5, 6], 2, 2)
    assert empty.top is not None and empty.top.ids.shape == (0, 2)
    server.most = 0
    with pytest.raises(InvalidInput, match=r"auxiliary_models\.0: http\S+ gives fewer prompt_logprobs than the 2"):
        await AuxiliaryModels.start([model(url)], replace(POLICY, top=2), [], {""})


async def test_a_server_without_log_probabilities_is_no_teacher(served: tuple[Server, str]) -> None:
    server, url = served
    server.teaches = False
    (await start(model(url))).close()
    with pytest.raises(InvalidInput, match=r"auxiliary_models\.0: http\S+ gives no prompt_logprobs; a teacher needs"):
        await start(model(url), {"judge"})


@pytest.mark.parametrize(
    ("changed", "status", "error", "said"),
    [
        ({"path": "owner/other"}, 200, InvalidInput, r"0\.model_path: 'owner/other' is not served at .*; owner/judge"),
        ({"api_key_env": "NOT_SET"}, 200, InvalidInput, r"external_model\.api_key_env: NOT_SET is not set"),
        ({"api_key_env": "PATH"}, 200, InvalidInput, r"api_key_env: http\S+ refuses the key in PATH \(401\)"),
        ({"api_key_env": ""}, 200, InvalidInput, r"api_key_env: http\S+ refuses a call without a key \(401\)"),
        ({}, 400, InvalidInput, r"external_model: http\S+ answers 400: too long for this model"),
        ({"timeout_seconds": 0.2}, 503, Unavailable, r"external_model: http\S+ (answers 503|did not answer)"),
        ({"base_url": "http://127.0.0.1:1/v1"}, 200, Unavailable, r"base_url: http\S+ is not reachable"),
    ],
)
async def test_what_does_not_answer_is_refused_before_a_task_is_played(
    served: tuple[Server, str], changed: dict[str, Any], status: int, error: type[Exception], said: str
) -> None:
    server, url = served
    server.status = status
    with pytest.raises(error, match=said) as caught:
        await start(model(**{"url": changed.pop("base_url", url), **changed}))
    assert KEY not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


async def test_no_answer_in_time_and_too_few_replies_are_said(served: tuple[Server, str]) -> None:
    server, url = served
    models = await start(model(url, timeout_seconds=1))
    server.replies = 1
    with pytest.raises(InvalidInput, match=r"gives 1 of 2 replies"):
        await models.judge().chat(ASK, SamplingParams(n=2))
    server.wait = 30
    with pytest.raises(Unavailable, match=r"external_model: http\S+ did not answer within 1 s"):
        await models.judge().chat(ASK, SamplingParams())


@pytest.mark.parametrize("proxy", ["socks5h://127.0.0.1:9", "ftp://127.0.0.1:9"])
async def test_a_proxy_that_cannot_be_used_is_named(
    served: tuple[Server, str], monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    """A model elsewhere is reached as its user's shell says."""
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(
        InvalidInput, match=r"external_model\.base_url: the shell's proxies .*are unusable: .*unset them"
    ):
        await start(model(served[1]))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("ALL_PROXY")
    (await start(model(served[1]))).close()
