"""Thoughts beyond their budget are ended by the workflow: what it writes is not trained, what follows is."""

import json
from typing import Any

import numpy as np
import pytest

from support.fakes.explorers.toolbox import END, Toolbox, encode, make_episode_task
from trinity.config.workflows import workflow_problems
from trinity.data.experience import Experience, Truncation
from trinity.explorer.workflows.thinking import ThinkingBudgetWorkflow
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Response, Score

pytestmark = pytest.mark.core

CLOSE = encode("</think>")


async def reply(policy: Any, budget: int, max_tokens: int = 40, **args: Any) -> tuple[Experience, Response]:
    asked: list[Response] = []

    def scored(name: str, answer: Response) -> Score:
        asked.append(answer)
        return Score(float("42" in answer.response), {})

    task = make_episode_task(
        json.dumps({"thinking_token_budget": budget, **args}),
        1,
        row_json='{"question": "6*7"}',
        format={"prompt_key": "question", "reply_prefix": ">"},
        max_tokens=max_tokens,
    )
    (made,) = await ThinkingBudgetWorkflow(task, Toolbox(policy, scored=scored)).run()  # type: ignore[arg-type]
    made.check("experience")
    return made, asked[0]


def thinks(said: list[tuple[str, str]]) -> str:
    return "42" if "</think>" in said[-1][1] else "so six times seven"


async def test_thoughts_beyond_the_budget_are_ended_and_the_policy_answers() -> None:
    made, answer = await reply(thinks, 4)
    response = made.token_ids[made.prompt_length :].tolist()
    assert response == [*encode("so s"), *CLOSE, *encode("42"), END]
    assert made.action_mask.tolist() == [True] * 4 + [False] * len(CLOSE) + [True] * 3
    assert not made.logprobs[4 : 4 + len(CLOSE)].any() and (made.logprobs[made.action_mask] == np.float32(-0.5)).all()
    assert (made.reward, made.metrics["thinking_cut"], made.metrics["response_tokens"]) == (1.0, 1.0, 7.0)
    assert answer.response == made.response_text == ">so s</think>42"
    assert made.truncation is Truncation.NONE


async def test_short_thoughts_are_a_plain_reply() -> None:
    made, _ = await reply(lambda _: "a</think>42", 20)
    assert made.action_mask.all() and made.metrics["thinking_cut"] == 0
    assert made.token_ids[made.prompt_length :].tolist() == [*encode("a</think>42"), END]


async def test_thoughts_that_ended_by_themselves_are_continued_as_they_are() -> None:
    made, _ = await reply(lambda said: "42" if said[-1][1].endswith("long") else "a</think>long answer", 13)
    assert made.token_ids[made.prompt_length :].tolist() == [*encode("a</think>long"), *encode("42"), END]
    assert made.action_mask.all() and made.metrics["thinking_cut"] == 0


async def test_thoughts_whose_end_other_tokens_spell_are_continued_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `</think>` followed by a newline, `>` and the newline are one token in many vocabularies."""
    alone = [*encode("</think"), 10**6]
    monkeypatch.setattr(Toolbox, "tokens", lambda self, text: alone if text == "</think>" else encode(text))
    made, _ = await reply(lambda said: "42" if said[-1][1].endswith("long") else "a</think>long answer", 13)
    assert made.token_ids[made.prompt_length :].tolist() == [*encode("a</think>long"), *encode("42"), END]
    assert made.action_mask.all() and made.metrics["thinking_cut"] == 0


async def test_a_budget_of_none_begins_with_the_answer() -> None:
    made, _ = await reply(thinks, 0)
    assert made.token_ids[made.prompt_length :].tolist() == [*CLOSE, *encode("42"), END]
    assert made.action_mask.tolist() == [False] * len(CLOSE) + [True] * 3


async def test_without_room_for_an_answer_the_reply_is_truncated() -> None:
    made, answer = await reply(thinks, 100, max_tokens=10)
    assert made.truncation is Truncation.RESPONSE and answer.truncated
    assert made.response_length == 10 and made.action_mask.all()


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ({}, "thinking_token_budget"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
        ({"thinking_token_budget": 8, "reasoning_end_str": ""}, "reasoning_end_str"),
        ({"thinking_token_budget": 8, "reward_model": 1}, "reward_model"),
        ({"thinking_token_budget": 8, "budget": 1}, "budget"),
    ],
)
async def test_wrong_arguments_are_refused_by_check_and_by_the_workflow(args: dict[str, Any], name: str) -> None:
    assert [found for found, _ in workflow_problems("thinking_budget_workflow", args)] == [name]
    with pytest.raises(InvalidInput, match=f"workflow_args.{name}"):
        await ThinkingBudgetWorkflow(
            make_episode_task(json.dumps(args), row_json='{"prompt": "6*7"}'), Toolbox(thinks)
        ).run()  # type: ignore[arg-type]
