"""Agents in a workflow, on a real engine: their sessions are the group, and what fails in one fails the attempt."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import pytest_asyncio

from support.fakes.explorers.toolbox import make_episode_task
from support.servers.shared_engine import ENGINE_TESTS, MAX_LENGTH
from trinity import plugins
from trinity.config.schema.model import ModelConfig
from trinity.data.experience import AttemptFailure, Group, Outcome, TaskKind
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.engine.auxiliary import AuxiliaryModels
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.environments.client import EnvironmentClient
from trinity.explorer.rollout import attempt
from trinity.explorer.rollout.toolbox import ExplorerTools
from trinity.explorer.serving.endpoint import PooledClient
from trinity.explorer.sessions.server import AgentGateway
from trinity.explorer.weights.load_history import WeightsWithdrawn
from trinity.explorer.workflows.agents import AgentWorkflow
from trinity.runtime.errors import FailureCause
from trinity.sdk.contract import Score

pytestmark = [pytest.mark.core, *ENGINE_TESTS]

ASKED: list[Any] = [{"role": "user", "content": "1+1"}]
PROGRAM = """
from openai import OpenAI
reply = OpenAI().chat.completions.create(model="any", messages=[{"role": "user", "content": "1+1"}])
assert reply.choices[0].finish_reason in ("stop", "length")
"""
Play = Callable[[Any], Awaitable[float | Sequence[float] | Score]]


@pytest_asyncio.fixture(loop_scope="session")
async def tools(pool: EnginePool, quickstart_model: Path) -> AsyncIterator[ExplorerTools]:
    tokenizer = ChatTokenizer(ModelConfig(model_path=str(quickstart_model)))
    gateway = AgentGateway(pool, str(quickstart_model), tokenizer.template, bool(tokenizer.history_problem))
    nowhere = EnvironmentClient("127.0.0.1:1")
    made = ExplorerTools(pool, tokenizer, nowhere, AuxiliaryModels({}), MAX_LENGTH, MAX_LENGTH, gateway)
    yield made
    await made.close()


async def explore(tools: ExplorerTools, monkeypatch: pytest.MonkeyPatch, play: Play, **changes: Any) -> Outcome:
    class Played(AgentWorkflow):
        async def play(self, agent: Any) -> float | Sequence[float] | Score:
            return await play(agent)

    monkeypatch.setitem(plugins.WORKFLOWS, "played", Played)
    task = make_episode_task(workflow="played", timeout_seconds=300.0, max_tokens=12, **changes)
    return await attempt.explore(task, 1, "me", tools)


def chat(agent: Any, messages: Any = ASKED) -> Any:
    return agent.asynchronous.chat.completions.create(model="any", messages=messages)


async def test_agents_in_the_loop_in_a_thread_and_in_a_process_make_a_group(
    tools: ExplorerTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = set()

    async def play(agent: Any) -> Score:
        keys.add(agent.key)
        await chat(agent)
        sync = agent.sync.chat.completions.create
        await asyncio.to_thread(sync, model="any", messages=cast(Any, [{"role": "user", "content": "2+2"}]))
        environment = {**os.environ, **agent.environment}
        program = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, env=environment)
        assert await program.wait() == 0
        return Score(0.5, {"accuracy": 1.0})

    group = await explore(tools, monkeypatch, play)
    assert isinstance(group, Group), group
    assert [(e.rollout, e.step, e.reward) for e in group.experiences] == [(r, s, 0.5) for r in (0, 1) for s in range(3)]
    first = group.experiences[0]
    assert first.metrics["accuracy"] == 1 and "1+1" in first.prompt_text and first.response_text
    assert len(keys) == 2, "each session has a key of its own"


async def test_an_evaluation_counts_each_session_once(tools: ExplorerTools, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(agent: Any) -> list[float]:
        for text in ("1", "2"):
            await chat(agent, [{"role": "user", "content": text}])
        return [1.0, 2.0]

    group = await explore(tools, monkeypatch, play, kind=TaskKind.EVALUATION)
    assert isinstance(group, Group), group
    assert [(e.rollout, e.reward) for e in group.experiences] == [(0, 2.0), (1, 2.0)]


async def raises(agent: Any) -> float:
    await chat(agent)
    raise RuntimeError("no idea")


async def hides_a_failed_call(agent: Any) -> float:
    call = {"id": "a", "type": "function", "function": {"name": "launch", "arguments": "{}"}}
    with suppress(openai.APIError):
        await chat(agent, [*ASKED, {"role": "assistant", "tool_calls": [call]}])
    return 1.0


async def has_no_end(agent: Any) -> Any:
    await chat(agent)


async def asks_nothing(agent: Any) -> float:
    return 1.0


async def gives_no_number(agent: Any) -> float:
    await chat(agent)
    return float("nan")


@pytest.mark.parametrize(
    ("play", "reason"),
    [
        (raises, "RuntimeError: no idea"),
        (hides_a_failed_call, "SessionFailed: the history calls 'launch'"),
        (has_no_end, "SessionFailed: the session ended without a reward"),
        (asks_nothing, "SessionFailed: the agent never called the policy"),
        (gives_no_number, "reward: is nan, must be finite"),
    ],
)
async def test_a_session_that_is_not_whole_is_a_failed_attempt_with_its_cause(
    tools: ExplorerTools, monkeypatch: pytest.MonkeyPatch, play: Play, reason: str
) -> None:
    failure = await explore(tools, monkeypatch, play)
    assert isinstance(failure, AttemptFailure)
    assert failure.cause is FailureCause.WORKFLOW_ERROR and reason in failure.error


async def test_a_session_with_withdrawn_weights_is_played_again(
    tools: ExplorerTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = PooledClient.good_outputs, []

    async def withdrawn_first(self: PooledClient, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise WeightsWithdrawn("tokens were sampled by version 1, which was rejected")
        async for output in generate(self, *args, **kwargs):
            yield output

    async def play(agent: Any) -> float:
        await chat(agent)
        return 1.0

    monkeypatch.setattr(PooledClient, "good_outputs", withdrawn_first)
    group = await explore(tools, monkeypatch, play)
    assert isinstance(group, Group), group
    assert len(group.experiences) == 2
