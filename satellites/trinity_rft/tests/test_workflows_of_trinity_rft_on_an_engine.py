"""Five workflows written for Trinity-RFT, on a real engine: what is trained is what it sampled, with its values."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from support.fakes.explorers.toolbox import make_episode_task
from support.fakes.trinity_rft.loading import loaded
from support.servers.shared_engine import ENGINE_TESTS, MAX_LENGTH
from trinity import plugins
from trinity.common.experience import Experience as Made
from trinity.common.workflows import Workflow, WorkflowWithRecording
from trinity.config.schema.model import ModelConfig
from trinity.data.experience import AttemptFailure, Experience, Group
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.engine.auxiliary import AuxiliaryModels
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.environments.client import EnvironmentClient
from trinity.explorer.rollout import attempt
from trinity.explorer.rollout.toolbox import ExplorerTools
from trinity.explorer.sessions.server import AgentGateway
from trinity.sdk.contract import Score

pytestmark = [pytest.mark.extended, *ENGINE_TESTS]

ASKED = [{"role": "user", "content": "1+1"}]


@pytest_asyncio.fixture(loop_scope="session")
async def tools(pool: EnginePool, quickstart_model: Path) -> AsyncIterator[ExplorerTools]:
    tokenizer = ChatTokenizer(ModelConfig(model_path=str(quickstart_model)))
    gateway = AgentGateway(pool, str(quickstart_model), tokenizer.template, bool(tokenizer.history_problem))
    nowhere = EnvironmentClient("127.0.0.1:1")
    made = ExplorerTools(pool, tokenizer, nowhere, AuxiliaryModels({}), MAX_LENGTH, MAX_LENGTH, gateway)
    with loaded("workflows"):
        yield made
    await made.close()


async def explore(tools: ExplorerTools, workflow: str, **changes: Any) -> Any:
    row = json.dumps({"question": "1+1", "answer": "2"})
    task = make_episode_task(
        workflow=workflow,
        row_json=row,
        format={"prompt_key": "question", "response_key": "answer"},
        reward_function="last_number",
        timeout_seconds=300.0,
        max_tokens=12,
        **changes,
    )
    return await attempt.explore(task, 1, "me", tools)


def values(model: Any, experience: Experience) -> np.ndarray:
    """Log-probabilities of the response, by transformers."""
    ids = torch.from_numpy(experience.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logs = torch.log_softmax(model(ids).logits[0, :-1].double(), -1)
    found: np.ndarray = logs.gather(1, ids[0, 1:, None])[experience.prompt_length - 1 :, 0].numpy()
    return found


async def test_every_form_of_workflow_makes_a_group_as_it_was_sampled(
    tools: ExplorerTools, quickstart_model: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(quickstart_model, dtype=torch.float32).eval()
    for workflow in ("hinted_sums", "best_of_two", "second_look", "history_agent", "stitched"):
        group = await explore(tools, workflow)
        assert isinstance(group, Group), (workflow, group)
        assert [experience.rollout for experience in group.experiences] == [0, 1], workflow
        for experience in group.experiences:
            mask = experience.action_mask
            assert mask.any(), workflow
            np.testing.assert_allclose(experience.logprobs[mask], values(model, experience)[mask], atol=2e-4)


async def test_an_agents_history_has_every_reply_with_its_prompt(
    tools: ExplorerTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Agent(Workflow):
        is_async = True

        async def run_async(self) -> list[Made]:
            client, messages = self.model.get_openai_async_client(), list[Any](ASKED)
            assert Path(client.model_path).is_dir()  # type: ignore[attr-defined]
            for _ in range(2):
                done = await client.chat.completions.create(model=client.model_path, messages=messages)  # type: ignore
                messages += [done.choices[0].message.model_dump(), *ASKED]
            blocking = self.model.get_openai_client().chat.completions.create
            blocking(model="any", messages=messages, temperature=0.5)  # type: ignore[call-overload]
            made = self.model.extract_experience_from_history()
            for experience in made:
                experience.reward = 1.0
            return made

    monkeypatch.setitem(plugins.WORKFLOWS, "agent", Agent)
    group = await explore(tools, "agent")
    assert isinstance(group, Group), group
    first, second, other = group.experiences[:3]
    assert [(e.rollout, e.step) for e in group.experiences] == [(r, s) for r in (0, 1) for s in range(3)]
    assert first.action_mask.all() and second.action_mask.all()
    assert not other.action_mask.any(), "another temperature than the trainer's"
    assert second.token_ids[: len(first.token_ids)].tolist() == first.token_ids.tolist(), "a reply is prefilled by id"


async def test_log_probabilities_of_any_tokens_are_the_policys(
    tools: ExplorerTools, quickstart_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[np.ndarray] = []

    class Measures(Workflow):
        can_repeat = True

        def run(self) -> list[Made]:
            made = self.model.generate(["1+1="], n=self.repeat_times)
            for experience in made:
                experience.reward = 0.0
            found.append(self.model.logprobs(made[0].tokens).numpy()[made[0].prompt_length - 1 :])
            return made

    monkeypatch.setitem(plugins.WORKFLOWS, "measures", Measures)
    group = await explore(tools, "measures")
    assert isinstance(group, Group), group
    np.testing.assert_allclose(found[0], group.experiences[0].logprobs, atol=2e-4)


async def test_a_call_that_the_gateway_refuses_fails_the_attempt_though_the_agent_hides_it(
    tools: ExplorerTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hides(Workflow):
        def run(self) -> list[Made]:
            client: Any = self.model.get_openai_client()
            call = {"id": "a", "type": "function", "function": {"name": "launch", "arguments": "{}"}}
            try:
                client.chat.completions.create(
                    model="any", messages=[*ASKED, {"role": "assistant", "tool_calls": [call]}]
                )
            except Exception:
                (made,) = self.model.chat(ASKED)
            made.reward = 1.0
            return [made]

    monkeypatch.setitem(plugins.WORKFLOWS, "hides", Hides)
    failure = await explore(tools, "hides")
    assert isinstance(failure, AttemptFailure) and "the history calls 'launch'" in failure.error


async def test_tokens_around_a_forced_end_of_thoughts_have_the_engines_values(
    tools: ExplorerTools, quickstart_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def score(name: str, answers: Any, row: Any, args: Any) -> list[Score]:
        return [Score(1.0, {}) for _ in answers]

    monkeypatch.setattr(tools, "score", score)
    args = json.dumps({"thinking_token_budget": 4, "reasoning_end_str": "#"})
    group = await explore(tools, "thinking_budget_workflow", workflow_args_json=args)
    assert isinstance(group, Group), group
    model = AutoModelForCausalLM.from_pretrained(quickstart_model, dtype=torch.float32).eval()
    assert any(experience.metrics["thinking_cut"] for experience in group.experiences)
    for experience in group.experiences:
        mask = experience.action_mask
        if experience.metrics["thinking_cut"]:
            assert mask[:6].tolist() == [True] * 4 + [False, True]
        np.testing.assert_allclose(experience.logprobs[mask], values(model, experience)[mask], atol=2e-4)


PROGRAM = """
from openai import OpenAI
client, messages = OpenAI(), [{"role": "user", "content": "1+1"}]
for _ in range(2):
    reply = client.chat.completions.create(model="any", messages=messages).choices[0].message
    messages += [reply.model_dump(), {"role": "user", "content": "Sure?"}]
"""


async def test_an_agent_in_another_process_is_recorded_as_a_conversation(
    tools: ExplorerTools, quickstart_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorded(WorkflowWithRecording):
        async def run_async(self) -> dict[str, float]:  # type: ignore[override]
            environment = {**os.environ, "OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}
            program = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, env=environment)
            assert await program.wait() == 0
            await self.update_reward(0.25, info={"by": "a test"})
            return {"agent/turns": 2}

    class Unrewarded(WorkflowWithRecording):
        async def run_async(self) -> dict[str, float]:  # type: ignore[override]
            assert self.base_url
            return {}

    monkeypatch.setitem(plugins.WORKFLOWS, "recorded", Recorded)
    group = await explore(tools, "recorded")
    assert isinstance(group, Group), group
    assert [(e.rollout, e.step, e.reward) for e in group.experiences] == [(0, 0, 0.25), (1, 0, 0.25)]
    model = AutoModelForCausalLM.from_pretrained(quickstart_model, dtype=torch.float32).eval()
    for experience in group.experiences:
        mask = experience.action_mask
        assert experience.metrics["agent/turns"] == experience.metrics["turns"] == 2
        assert json.loads(experience.info_json) == {"by": "a test"}
        np.testing.assert_allclose(experience.logprobs[mask], values(model, experience)[mask], atol=2e-4)
    monkeypatch.setitem(plugins.WORKFLOWS, "unrewarded", Unrewarded)
    failure = await explore(tools, "unrewarded")
    assert isinstance(failure, AttemptFailure) and "the session ended without a reward" in failure.error
