"""Agents' sessions on a real engine: whatever a client asks for, what is recorded is what the engine sampled."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from support.servers.shared_engine import ENGINE_TESTS, update_info
from trinity.config.schema.model import ModelConfig
from trinity.data.experience import Experience, SamplingParams
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.sessions.agents import AgentSession
from trinity.explorer.sessions.server import AgentGateway

pytestmark = [pytest.mark.core, *ENGINE_TESTS]

SAMPLING = SamplingParams(max_tokens=24)
IDS = {"return_token_ids": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "integer", "maximum": 9}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
Messages = list[Any]


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(pool: EnginePool, quickstart_model: Path) -> AsyncIterator[AgentGateway]:
    tokenizer = ChatTokenizer(ModelConfig(model_path=str(quickstart_model)))
    options = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    made = AgentGateway(pool, str(quickstart_model), tokenizer.template, bool(tokenizer.history_problem), options)
    yield made
    await made.close()


def asked(text: str) -> Messages:
    return [{"role": "user", "content": text}]


async def ask(agent: AgentSession, messages: Messages, **options: Any) -> Any:
    return await agent.asynchronous.chat.completions.create(
        model="any", messages=messages, extra_body=options.pop("extra_body", IDS), **options
    )


def trained(experience: Experience) -> list[int]:
    return [int(t) for t in experience.token_ids[experience.prompt_length :][experience.action_mask]]


def check_logprobs(model: Path, experience: Experience) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.from_numpy(experience.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logs = torch.log_softmax(policy(ids).logits[0, :-1].double(), -1)
    found = logs.gather(1, ids[0, 1:, None])[experience.prompt_length - 1 :, 0].numpy()
    mask = experience.action_mask
    np.testing.assert_allclose(experience.logprobs[mask], found[mask], atol=2e-4)


async def test_turns_are_prefilled_by_id_and_trained_as_sampled(gateway: AgentGateway, quickstart_model: Path) -> None:
    async with gateway.session(SAMPLING, 300) as agent:
        messages, engine_ids = asked("1+1"), []
        for text in ("2+2", "3+3", ""):
            reply = await ask(agent, messages)
            (choice,) = reply.choices
            engine_ids += choice.token_ids
            before = reply.prompt_token_ids
            messages += [choice.message.model_dump(), *asked(text)]
        agent.reward = 0.5
        (experience,) = agent.experiences(3)
    experience.check("experience")
    assert trained(experience) == engine_ids
    assert experience.token_ids[: len(before)].tolist() == before, "the last prompt is what came before the last reply"
    assert (experience.rollout, experience.step, experience.reward) == (3, 0, 0.5)
    check_logprobs(quickstart_model, experience)


async def test_a_streamed_call_is_recorded_as_a_whole_one_is(gateway: AgentGateway, quickstart_model: Path) -> None:
    async with gateway.session(SAMPLING, 300) as agent:
        text, engine_ids = "", []
        async for chunk in await ask(agent, asked("1+1"), stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                engine_ids += getattr(choice, "token_ids", None) or []
        follow = await ask(agent, [*asked("1+1"), {"role": "assistant", "content": text}, *asked("2+2")])
        agent.reward = 1
        (experience,) = agent.experiences(0)
    assert trained(experience) == [*engine_ids, *follow.choices[0].token_ids]
    check_logprobs(quickstart_model, experience)


async def test_n_replies_are_branches(gateway: AgentGateway) -> None:
    async with gateway.session(SAMPLING, 300) as agent:
        replies = (await ask(agent, asked("1+1"), n=3)).choices
        agent.reward = [1.0, 2.0, 3.0]
        found = agent.experiences(0)
    assert [trained(experience) for experience in found] == [list(choice.token_ids) for choice in replies]
    assert [(e.step, e.reward) for e in found] == [(0, 1.0), (1, 2.0), (2, 3.0)]


async def test_an_edited_history_is_a_branch_with_the_replies_by_id(gateway: AgentGateway) -> None:
    async with gateway.session(SAMPLING, 300) as agent:
        first = (await ask(agent, asked("1+1"))).choices[0]
        told = [{"role": "system", "content": "Be brief."}, *asked("1+1"), first.message.model_dump(), *asked("2+2")]
        reply = await ask(agent, told)
        agent.reward = 1
        one, other = agent.experiences(0)
    ids = list(first.token_ids)
    assert trained(one) == ids and trained(other) == list(reply.choices[0].token_ids)
    prompt = reply.prompt_token_ids
    assert any(prompt[at : at + len(ids)] == ids for at in range(len(prompt))), "in the prompt as it was sampled"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_a_call_of_a_tool_is_recognised_in_the_history(
    gateway: AgentGateway, choice: Any, streamed: bool
) -> None:
    sampling = SamplingParams(max_tokens=1500)  # a policy that knows nothing may call often
    async with gateway.session(sampling, 300) as agent:
        if streamed:
            options: Any = {"tools": [TOOL], "tool_choice": choice, "extra_body": IDS}
            chat = agent.asynchronous.chat.completions
            async with chat.stream(model="any", messages=asked("1+1"), **options) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await ask(agent, asked("1+1"), tools=[TOOL], tool_choice=choice)).choices[0].message
        assert message.tool_calls and message.tool_calls[0].function.name == "add"
        json.loads(message.tool_calls[0].function.arguments)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
        await ask(agent, [*asked("1+1"), message.model_dump(exclude_none=True), result], tools=[TOOL])
        agent.reward = 1
        (experience,) = agent.experiences(0)
    mask = experience.action_mask
    assert not mask[0] and mask[-1], "the call was sampled under a constraint, the answer was not"


async def test_constraints_and_other_temperatures_are_recorded_and_not_trained(gateway: AgentGateway) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 9}}}
    cases: list[dict[str, Any]] = [{"response_format": form}, {"temperature": 0.5}, {"top_p": 0.9}]
    async with gateway.session(SAMPLING, 300) as agent:
        for number, case in enumerate(cases):
            reply = await ask(agent, asked(str(number)), **case)
            if "response_format" in case:
                assert isinstance(json.loads(reply.choices[0].message.content), int)
        await ask(agent, asked("as the task says"))
        agent.reward = 1
        found = agent.experiences(0)
    assert [bool(experience.action_mask.any()) for experience in found] == [False, False, False, True]


async def test_stop_and_logprobs_are_as_the_client_asked(gateway: AgentGateway, quickstart_model: Path) -> None:
    async with gateway.session(SamplingParams(max_tokens=200), 300) as agent:
        reply = (await ask(agent, asked("1+1"), stop=["a", "e", "1"], logprobs=True, top_logprobs=2)).choices[0]
        agent.reward = 1
        (experience,) = agent.experiences(0)
    assert trained(experience) == list(reply.token_ids)
    given = [position.logprob for position in reply.logprobs.content]
    np.testing.assert_allclose(experience.logprobs, given, atol=1e-5)
    assert all(len(position.top_logprobs) >= 2 for position in reply.logprobs.content)
    check_logprobs(quickstart_model, experience)


async def test_a_load_in_the_middle_of_a_call_is_in_its_spans(
    gateway: AgentGateway, pool: EnginePool, quickstart_model: Path
) -> None:
    async with gateway.session(SamplingParams(max_tokens=600), 300) as agent:
        begun = asyncio.Event()

        async def stream(top: int) -> None:
            options = {"logprobs": True, "top_logprobs": top} if top else {}
            async for _ in await ask(agent, asked(f"{top}+1"), stream=True, extra_body={"ignore_eos": True}, **options):
                begun.set()

        streams = [asyncio.create_task(stream(top)) for top in (0, 2)]
        await asyncio.wait_for(begun.wait(), 60)
        serial, _ = await pool.load(7, update_info(quickstart_model))
        pool.loads.trust(serial)
        await asyncio.wait_for(asyncio.gather(*streams), 120)
        agent.reward = 1
        found = agent.experiences(0)
    for experience in found:
        experience.check("experience")
        assert experience.version_spans[-1].version == 7
    assert any([span.version for span in experience.version_spans] == [0, 7] for experience in found)


async def test_a_prompt_that_is_too_long_is_a_400_that_the_agent_may_answer(gateway: AgentGateway) -> None:
    async with gateway.session(SAMPLING, 300) as agent:
        await ask(agent, asked("1+1"))
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(agent, asked("1" * 4000))
        assert "maximum context length" in str(refused.value)
        agent.reward = 1
        assert len(agent.experiences(0)) == 1


async def test_responses_and_messages_are_recorded_as_chat_is(gateway: AgentGateway, quickstart_model: Path) -> None:
    async with gateway.session(SAMPLING, 300) as agent:
        responses = agent.asynchronous.responses
        first = await responses.create(model="any", input="1+1")
        items: list[Any] = [{"role": "user", "content": "1+1"}, *(item.model_dump() for item in first.output)]
        async with responses.stream(model="any", input=[*items, {"role": "user", "content": "2+2"}]) as events:
            second = await events.get_final_response()
        items += [{"role": "user", "content": "2+2"}, *(item.model_dump(exclude={"parsed"}) for item in second.output)]
        await responses.create(model="any", input=[*items, {"role": "user", "content": "3+3"}])
        agent.reward = 1
        (experience,) = agent.experiences(0)
    assert experience.metrics["turns"] == 3
    check_logprobs(quickstart_model, experience)

    async with gateway.session(SAMPLING, 300) as agent:
        root = agent.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key=agent.key) as client:
            messages: list[Any] = asked("1+1")
            for text in ("2+2", "3+3", ""):
                if text == "3+3":
                    async with client.messages.stream(model="any", max_tokens=24, messages=messages) as told:
                        reply = await told.get_final_message()
                else:
                    reply = await client.messages.create(model="any", max_tokens=24, messages=messages)
                messages += [{"role": "assistant", "content": [b.model_dump() for b in reply.content]}, *asked(text)]
        agent.reward = 1
        (experience,) = agent.experiences(0)
    assert experience.metrics["turns"] == 3
    check_logprobs(quickstart_model, experience)


async def test_a_call_in_responses_is_recognised_in_the_history(gateway: AgentGateway) -> None:
    function = TOOL["function"]
    sampling = SamplingParams(max_tokens=1500)
    async with gateway.session(sampling, 300) as agent:
        tools: list[Any] = [{"type": "function", **function}]
        create = agent.asynchronous.responses.create
        first = await create(model="any", input="1+1", tools=tools, tool_choice="required")
        called = [item for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"} for call in called]
        told: list[Any] = [{"role": "user", "content": "1+1"}, *(i.model_dump() for i in first.output), *results]
        await create(model="any", input=told, tools=tools)
        agent.reward = 1
        assert called and len(agent.experiences(0)) == 1
