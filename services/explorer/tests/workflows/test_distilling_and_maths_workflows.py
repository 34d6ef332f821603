"""Single-turn workflows whose reward or teacher is a model, and the maths ones."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.fakes.explorers.toolbox import Toolbox, make_episode_task
from trinity.data.experience import UNLIMITED, Experience, Group, Task, Truncation
from trinity.data.wire import decode_outcome, encode_outcome
from trinity.explorer.rollout import attempt
from trinity.explorer.workflows import WORKFLOWS
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Response, Score

pytestmark = pytest.mark.core


def row(**more: Any) -> str:
    return json.dumps({"prompt": "1+1?", "response": "2", **more})


def task(n: int = 2, row_json: str = "", **args: Any) -> Task:
    return make_episode_task(json.dumps(args), n, row_json=row_json or row())


def scored(scorer: str, answer: Response) -> Score:
    return Score(0.5, {"accuracy": float(answer.truth in answer.response), scorer: 1.0})


def tools() -> Toolbox:
    return Toolbox(lambda _: "it is 2", scored=scored)


async def run(name: str, what: Task, box: Toolbox) -> list[Experience]:
    return await WORKFLOWS[name](what, box).run()


async def test_a_teachers_log_probabilities_are_those_of_the_sampled_tokens_and_travel_with_them() -> None:
    box = tools()
    made = await run("on_policy_distill_workflow", task(row_json='{"prompt": "hello"}'), box)
    tokens = made[0].token_ids[made[0].prompt_length :]
    assert made[0].teacher_logprobs is not None
    assert made[0].teacher_logprobs.tolist() == pytest.approx((-tokens / 1000).tolist())
    assert made[0].metrics["teacher_kl"] == pytest.approx(float(np.mean(made[0].logprobs - made[0].teacher_logprobs)))
    assert made[0].reward == 0
    group = await attempt.explore(
        make_episode_task("{}", 2, workflow="on_policy_distill_math_workflow", row_json=row()), 1, "me", box
    )
    assert isinstance(group, Group)
    again = decode_outcome(encode_outcome(group))
    assert isinstance(again, Group)
    assert again.experiences[0].teacher_logprobs is not None
    assert len(again.experiences[0].teacher_logprobs) == again.experiences[0].response_length
    assert again.experiences[0].metrics["accuracy"] == 1
    assert again.experiences[0].teacher_top is None, "no loss reads more"


async def test_a_teacher_that_is_told_more_gives_its_likeliest_tokens_of_the_same_reply() -> None:
    box = tools()
    box.teacher_top = 2
    args = {"teacher": "policy", "privileged": "It is {response}, of level {level}. {} {"}
    what = task(row_json=row(level=3), **args)
    made = await run("on_policy_distill_workflow", what, box)
    reply = made[0].token_ids[made[0].prompt_length :]
    model, told = box.taught[0]
    assert model == "policy"
    assert box.text(told).count("It is 2, of level 3. {} {") == 1
    assert "of level" not in box.text(made[0].token_ids[: made[0].prompt_length]), "the policy does not read it"
    assert made[0].teacher_top is not None and made[0].teacher_top.ids.dtype == np.int32
    assert made[0].teacher_top.ids.tolist() == [[token, token + 1] for token in reply]
    assert made[0].teacher_top.logprobs[:, 1].tolist() == [-9.0] * len(reply)
    made[0].check("made", replace(UNLIMITED, teacher_top=2))
    with pytest.raises(InvalidInput, match=r"task\.hint: is None, must be text"):
        await run("on_policy_distill_workflow", task(row_json=row(), privileged="{hint}"), box)
    long = task(row_json=row(prompt="x" * 9000), **args)
    (cut, *_), asked = await run("on_policy_distill_workflow", long, box), len(box.taught)
    assert (cut.teacher_top, cut.action_mask.any(), len(box.taught)) == (None, False, asked), "nothing of it is trained"


@pytest.mark.parametrize(
    ("name", "scorer"),
    [
        ("math_boxed_workflow", "math_boxed_reward"),
        ("math_eval_workflow", "accuracy_reward"),
        ("async_math_workflow", "accuracy_reward"),  # the task's
    ],
)
async def test_maths_workflows_are_scored_as_their_name_says(name: str, scorer: str) -> None:
    made = await run(name, task(), tools())
    assert made[0].metrics[scorer] == 1
    asked = "boxed" if "math_workflow" not in name else "<answer>"
    assert asked in made[0].prompt_text


@pytest.mark.parametrize("name", ["simple_workflow", "async_math_workflow", "math_boxed_workflow", "math_rm_workflow"])
async def test_the_reward_model_that_workflow_args_name_scores_and_the_function_measures(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = tools()
    asked: list[tuple[Any, str]] = []

    async def rate(conversations: Any, model: str = "") -> list[float]:
        asked.append((conversations, model))
        return [3.5, -1.25]

    monkeypatch.setattr(box, "rate", rate)
    made = await run(name, task(reward_model="helpful"), box)
    ((conversations, model),) = asked
    assert (model, [e.reward for e in made]) == ("helpful", [3.5, -1.25])
    assert [message["role"] for message in conversations[0]][-2:] == ["user", "assistant"]
    assert conversations[0][-1]["content"] == "it is 2"
    assert (made[0].metrics["reward_model"], made[0].metrics["accuracy"]) == (3.5, 1)
    (plain, _) = await run("simple_workflow", task(), box)
    assert (plain.reward, len(asked)) == (0.5, 1)


@pytest.mark.parametrize("name", ["simple_workflow", "math_workflow", "on_policy_distill_workflow"])
async def test_a_prompt_over_the_limit_is_cut_and_no_token_of_it_is_trained(name: str) -> None:
    box = tools()
    (fits, _) = await run(name, task(), box)
    assert (fits.truncation, fits.metrics["prompt_truncated"]) == (Truncation.NONE, 0)
    box.max_prompt_tokens = 5
    for made in await run(name, task(), box):
        assert (made.truncation, made.prompt_length, made.response_length) == (Truncation.PROMPT, 5, 1)
        assert (made.metrics["prompt_truncated"], made.metrics["response_truncated"]) == (1, 0)
        assert (made.reward, made.action_mask.any()) == (0, False)


@pytest.mark.parametrize(
    ("function", "references", "reward"),
    [("exact", ["it is 1", "it is 2"], 1), ("code_tests", ['["it is 1", "it is 2"]'], 0)],
)
async def test_each_right_answer_is_a_reference_but_tests_have_to_pass_together(
    function: str, references: list[str], reward: float
) -> None:
    given: list[str] = []

    def exact(_: str, answer: Response) -> Score:
        given.append(answer.truth)
        return Score(float(answer.truth == answer.response), {})

    what = make_episode_task("{}", 1, row_json=row(response=["it is 1", "it is 2"]), reward_function=function)
    (made,) = await run("simple_workflow", what, Toolbox(lambda _: "it is 2", scored=exact))
    assert (given, made.reward) == (references, reward)
