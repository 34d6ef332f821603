"""An agent on OpenAI's client shows images to a real engine, in several turns and branches: its experiences hold them,
and the trainer computes the log-probabilities that the engine sampled with.
"""

import asyncio
import base64
import importlib.util
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
import torch

from support.fakes.data.vision import KINDS, make_model, picture
from trinity.config.schema.model import ModelConfig
from trinity.data.experience import Experience, Limits, SamplingParams
from trinity.data.vision import ImageRules
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.serving import endpoint
from trinity.explorer.serving.asgi import App
from trinity.explorer.serving.endpoint import PooledClient
from trinity.explorer.sessions.agents import AgentSession
from trinity.explorer.sessions.in_process import InProcess
from trinity.explorer.sessions.server import AgentGateway
from trinity.explorer.types import EngineOptions
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.images import ImageReader
from trinity.trainer.data.microbatch import collate
from trinity.trainer.model.policy import load_policy

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None, reason="vLLM's Qwen-VL needs torchvision: '.[vision]'"
    ),
]

RED, WHITE, BLUE = picture(colour="red"), picture(64, 24, colour="white"), picture(64, 24, colour="blue")
SAMPLING = SamplingParams(max_tokens=16)
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=KINDS)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_model(tmp_path_factory.mktemp("agents") / "model", request.param)
    return ModelConfig(model_path=str(folder))


@pytest.fixture(scope="module")
def reader(config: ModelConfig) -> ImageReader:
    found = ImageReader.of(config)
    assert found is not None
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(config: ModelConfig, reader: ImageReader) -> AsyncIterator[EnginePool]:
    options = EngineOptions(config.model_path, "cpu", 512, images=reader.rules)
    made = await asyncio.wait_for(EnginePool.start(options, [None]), 180)
    yield made
    made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(pool: EnginePool, config: ModelConfig, reader: ImageReader) -> AsyncIterator[AgentGateway]:
    tokenizer = ChatTokenizer(config)
    rewrites = bool(tokenizer.history_problem)
    made = AgentGateway(pool, config.model_path, tokenizer.template, rewrites, images=reader.rules)
    yield made
    await made.close()


def asked(text: str, *images: bytes) -> dict[str, Any]:
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


async def ask(agent: AgentSession, messages: list[Any], **options: Any) -> Any:
    chat = agent.asynchronous.chat.completions
    return await chat.create(model="any", messages=messages, extra_body={"return_token_ids": True}, **options)


def check(experiences: Sequence[Experience], config: ModelConfig, reader: ImageReader) -> None:
    """The trainer's log-probabilities of trained tokens equal the engine's, and depend on the images."""
    limits = Limits(images=reader.rules)
    sequences = []
    for experience in experiences:
        experience.check("experience", limits)
        start, mask, logprobs = experience.prompt_length, experience.action_mask, experience.logprobs
        images = experience.images
        sequences.append(TrainSequence(experience.token_ids, start, logprobs, mask, 0, images=images))
    for packed in (True, False):
        policy = load_policy(config, torch.float32, 64, packed=packed)
        with torch.no_grad():
            found, _ = policy(collate(sequences, 0, packed, reader))
        for row, experience in zip(found.numpy(), experiences, strict=True):
            mask = experience.action_mask
            assert mask.any()
            np.testing.assert_allclose(row[: len(mask)][mask], experience.logprobs[mask], atol=TOLERANCE)


def shown(experience: Experience, rules: ImageRules) -> list[bytes]:
    for image in experience.images:
        assert experience.token_ids[image.start] == rules.token != experience.token_ids[image.start - 1]
    return [image.file for image in experience.images]


async def test_images_of_every_turn_are_in_the_experience(
    gateway: AgentGateway, config: ModelConfig, reader: ImageReader
) -> None:
    async with gateway.session(SAMPLING, 300) as agent:
        messages: list[Any] = [asked("what?", RED)]
        engine_ids: list[int] = []
        for news in (asked("and these?", WHITE, BLUE), asked("no image"), asked("red again?", RED), None):
            reply = await ask(agent, messages)
            (choice,) = reply.choices
            engine_ids += choice.token_ids
            messages += [choice.message.model_dump(), news]
        agent.reward = 1.0
        (experience,) = agent.experiences(0)
    assert shown(experience, reader.rules) == [RED, WHITE, BLUE, RED]
    end = len(experience.token_ids) - len(choice.token_ids)
    assert experience.token_ids[:end].tolist() == reply.prompt_token_ids, "as the engine read the last prompt"
    sampled = experience.token_ids[experience.prompt_length :][experience.action_mask]
    assert sampled.tolist() == engine_ids
    check([experience], config, reader)


async def test_another_image_of_the_same_size_begins_a_branch(
    gateway: AgentGateway, config: ModelConfig, reader: ImageReader
) -> None:
    """Its tokens are equal, and the reply of the first branch was not sampled after it."""
    async with gateway.session(SAMPLING, 300) as agent:
        first = (await ask(agent, [asked("what?", WHITE)])).choices[0].message.model_dump()
        for image in (WHITE, BLUE):
            await ask(agent, [asked("what?", image), first, asked("sure?")])
        agent.reward = 1.0
        same, other = agent.experiences(0)
    assert (shown(same, reader.rules), shown(other, reader.rules)) == ([WHITE], [BLUE])
    turns = [np.count_nonzero(np.diff(np.r_[0, one.action_mask.astype(int)]) == 1) for one in (same, other)]
    assert turns == [2, 1], "the former reply is context in the other branch"
    check([same, other], config, reader)


async def test_a_thread_streams_images_over_http_beside_tokens_that_look_like_them(
    gateway: AgentGateway, config: ModelConfig, reader: ImageReader
) -> None:
    def play(client: openai.OpenAI) -> None:
        messages: Any = [asked("what?", BLUE)]
        text = "".join(
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(model="any", messages=messages, stream=True, n=1)
        )
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "<|image_pad|>?"}]
        client.chat.completions.create(model="any", messages=messages)

    async with gateway.session(SAMPLING, 300) as agent:
        await asyncio.wait_for(asyncio.to_thread(play, agent.sync), 120)
        agent.reward = 1.0
        (experience,) = agent.experiences(0)
    assert shown(experience, reader.rules) == [BLUE]
    assert int((experience.token_ids == reader.rules.token).sum()) > reader.rules.tokens(64, 24)
    check([experience], config, reader)


async def test_the_endpoint_reads_no_url_of_a_client(pool: EnginePool, config: ModelConfig) -> None:
    """Calls outside sessions, as of `trinity serve`, which vLLM answers by itself."""
    client = PooledClient(pool)
    app = await endpoint.application(client, ["--model", config.model_path], ChatTokenizer(config).template)

    async def application() -> App:
        return app

    http = openai.DefaultAsyncHttpxClient(transport=InProcess(application))
    async with openai.AsyncOpenAI(base_url="http://here/v1", api_key="-", http_client=http) as calls:
        message: Any = asked("what?", RED)
        done = await calls.chat.completions.create(model=config.model_path, messages=[message], max_tokens=2)
        assert done.usage.prompt_tokens > 16
        message["content"][0]["image_url"]["url"] = "http://127.0.0.1:1/a.png"
        with pytest.raises(openai.BadRequestError, match="send a data: URL"):
            await calls.chat.completions.create(model=config.model_path, messages=[message])


async def test_images_that_do_not_fit_are_a_400(gateway: AgentGateway) -> None:
    async with gateway.session(SAMPLING, 300) as agent:
        large = picture(200, 200)
        for message, problem in (
            (asked("?", *[large] * 5), "maximum context length|longer than the maximum model length"),
            (asked("<|image_pad|>", RED), "has 2 image placeholders for 1 images"),
        ):
            with pytest.raises(openai.BadRequestError, match=problem):
                await ask(agent, [message])
        await ask(agent, [asked("?", RED)])
        agent.reward = 1.0
        assert len(agent.experiences(0)) == 1
