"""Rewards by a judge: rubrics, comparisons of a group, and a policy that judges itself."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from support.fakes.explorers.toolbox import Toolbox, make_episode_task
from trinity.compat_rft.workflows import WORKFLOWS
from trinity.data.experience import AttemptFailure, Experience, Task, TaskKind, Truncation
from trinity.explorer.environments.client import ScorerFailed
from trinity.explorer.rollout import attempt
from trinity.runtime.errors import FailureCause, InvalidInput
from trinity.sdk.contract import Response, Score

pytestmark = pytest.mark.core

RUBRIC = [{"description": "Is polite.", "weight": 3}, {"description": "Is short."}]


def row(**more: Any) -> str:
    return json.dumps({"prompt": "1+1?", "response": "2", **more})


def task(n: int = 2, row_json: str = "", **args: Any) -> Task:
    return make_episode_task(json.dumps(args), n, row_json=row_json or row())


def scored(scorer: str, answer: Response) -> Score:
    return Score(0.5, {"accuracy": float(answer.truth in answer.response), scorer: 1.0})


def tools(judged: Callable[[list[dict[str, Any]]], str] = lambda _: "[]") -> Toolbox:
    return Toolbox(lambda _: "it is 2", judged=judged, scored=scored)


async def run(name: str, what: Task, box: Toolbox) -> list[Experience]:
    return await WORKFLOWS[name](what, box).run()


async def test_a_rubric_is_the_weighted_mean_of_its_grades() -> None:
    asked = []

    def judge(messages: list[dict[str, Any]]) -> str:
        asked.append(messages[-1]["content"])
        return "The grades are [1, 0.5]."

    made = await run("rubric_judge_workflow", task(row_json=row(rubric=RUBRIC)), tools(judge))
    assert [e.reward for e in made] == [pytest.approx(3.5 / 4)] * 2
    assert made[0].metrics["rubric"] == pytest.approx(3.5 / 4)
    assert made[0].metrics["accuracy"] == 1, "the reward function still measures"
    assert "1. Is polite.\n2. Is short." in asked[0]
    given = task(row_json='{"prompt": "hello"}', rubric=["Is polite.", "Is short."])
    made = await run("rubric_judge_workflow", given, tools(judge))
    assert made[0].reward == 0.75
    assert "accuracy" not in made[0].metrics, "there is nothing to compare with"


async def test_ruler_compares_all_replies_of_the_group() -> None:
    asked = []

    def judge(messages: list[dict[str, Any]]) -> str:
        asked.append(messages[-1]["content"])
        return "[0.1, 0.9, 0.9]"

    made = await run("math_ruler_workflow", task(3), tools(judge))
    assert [e.reward for e in made] == [0.1, 0.9, 0.9]
    assert len(asked) == 1
    assert "The right answer is: 2" in asked[0]
    assert asked[0].count("it is 2") == 3


def own_judge(says: str) -> tuple[Toolbox, list[str]]:
    """The policy answers, and judges with `says` where it is shown replies."""
    asked: list[str] = []

    def policy(so_far: list[tuple[str, str]]) -> str:
        text = "".join(said for _, said in so_far)
        asked.append(text)
        return says if "Reply 1:" in text else ["it is 2", "it is 3"][sum("Reply" not in a for a in asked) % 2]

    def truth(scorer: str, answer: Response) -> Score:
        return Score(float(answer.truth in answer.response), {"accuracy": 1.0})

    return Toolbox(policy, scored=truth), asked


async def test_the_policy_judges_itself_and_every_second_task_trains_its_judgements() -> None:
    name = "math_trainable_ruler_workflow"
    box, asked = own_judge("[0.25, 0.75]")
    made = await run(name, make_episode_task("{}", 2, row_json=row(), ordinal=1), box)
    assert [e.reward for e in made] == [0.25, 0.75]
    assert [e.metrics["trains_judge"] for e in made] == [0, 0]
    assert "The right answer is" not in asked[-1]

    box, asked = own_judge("[0.25, 0.75]")
    made = await run(name, make_episode_task("{}", 2, row_json=row(), ordinal=2), box)
    right = [float("it is 2" in part) for part in asked[-1].split("\n\nReply ")[1:]]
    assert sorted(right) == [0, 1]
    expected = 1 - (abs(0.25 - right[0]) + abs(0.75 - right[1])) / 2
    assert [e.reward for e in made] == [pytest.approx(expected)] * 2
    for index, experience in enumerate(made):
        experience.check(f"experience {index}")
        assert "Reply 1:" in experience.prompt_text and experience.response_text == "[0.25, 0.75]"
        assert experience.action_mask.all() and experience.metrics["judged"] == 1

    box, _ = own_judge("both are fine")
    made = await run(name, make_episode_task("{}", 2, row_json=row(), ordinal=2), box)
    assert [(e.reward, e.metrics["judged"]) for e in made] == [(0, 0)] * 2, "it is trained to give a list"


async def test_an_evaluation_of_a_policy_that_judges_is_by_the_truth() -> None:
    box, asked = own_judge("[1, 1]")
    given = make_episode_task("{}", 2, row_json=row(), ordinal=2, kind=TaskKind.EVALUATION)
    made = await run("math_trainable_ruler_workflow", given, box)
    assert sorted(e.reward for e in made) == [0, 1]
    assert not [text for text in asked if "Reply" in text]


async def test_a_policy_that_judges_needs_the_truth() -> None:
    with pytest.raises(InvalidInput, match=r"task\.response: is missing; judgements are trained by it"):
        await run("math_trainable_ruler_workflow", task(2, '{"prompt": "1+1?"}'), own_judge("[1, 1]")[0])


@pytest.mark.parametrize("said", ["", "[1]", "[1, 2]", "[true, false]", "[" * 5000, "[NaN, 0]", '["1", "0"]'])
async def test_a_judge_that_gives_no_grades_is_a_failure_and_never_a_zero_reward(said: str) -> None:
    count = 0

    def judge(messages: list[dict[str, Any]]) -> str:
        nonlocal count
        count += 1
        return said

    with pytest.raises(ScorerFailed, match="no list of 2 numbers"):
        await run("math_ruler_workflow", task(2), tools(judge))
    assert count == 3
    failure = await attempt.explore(
        make_episode_task("{}", 2, workflow="math_ruler_workflow", row_json=row()), 1, "me", tools(judge)
    )
    assert isinstance(failure, AttemptFailure)
    assert failure.cause is FailureCause.SCORER_ERROR


@pytest.mark.parametrize(
    ("rubric", "message"),
    [
        (None, r"task\.rubric: is None, must be a list"),
        ([{"weight": 1}], r"task\.rubric\[0\]\.description: is required"),
        ([{"description": "x", "weight": 0}], r"task\.rubric\[0\]\.weight: is 0, must be greater than 0"),
    ],
)
async def test_a_bad_rubric_is_refused_by_its_field(rubric: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        await run("rubric_judge_workflow", task(row_json=row(rubric=rubric)), tools())


async def test_a_prompt_over_the_limit_is_cut_and_no_token_of_it_is_trained() -> None:
    box = tools(lambda _: "[1, 1]")
    (fits, _) = await run("math_ruler_workflow", task(), box)
    assert (fits.truncation, fits.metrics["prompt_truncated"]) == (Truncation.NONE, 0)
    box.max_prompt_tokens = 5
    for made in await run("math_ruler_workflow", task(), box):
        assert (made.truncation, made.prompt_length, made.response_length) == (Truncation.PROMPT, 5, 1)
        assert (made.metrics["prompt_truncated"], made.metrics["response_truncated"]) == (1, 0)
        assert (made.reward, made.action_mask.any()) == (0, False)
