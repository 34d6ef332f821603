"""Rows whose prompt is a list of messages, as veRL's preprocessing writes them."""

import json
from typing import Any

import numpy as np
import pytest

from support.fakes.explorers.toolbox import Toolbox, make_episode_task
from trinity.explorer.workflows import WORKFLOWS
from trinity.explorer.workflows.single_turn import SimpleWorkflow
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Score

pytestmark = pytest.mark.core

TALK = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2"}]
OWN = {"role": "system", "content": "Be short."}


def workflow(prompt: Any, name: str = "simple_workflow", **form: Any) -> SimpleWorkflow:
    given = {"prompt_key": "prompt", "response_key": "response", **form}
    task = make_episode_task("{}", 1, workflow=name, row_json=json.dumps({"prompt": prompt, "response": "4"}))
    made = WORKFLOWS[name](task, Toolbox(lambda _: "4"))
    assert isinstance(made, SimpleWorkflow)
    made.format.update(given)
    return made


def test_they_are_asked_as_they_are_written() -> None:
    assert workflow(TALK).messages() == TALK
    assert workflow(TALK, "math_workflow").messages() == TALK, "without the workflow's own system prompt"
    assert workflow(TALK, system_prompt="Answer.").messages() == [{"role": "system", "content": "Answer."}, *TALK]
    assert workflow([OWN, *TALK], system_prompt="Answer.").messages() == [OWN, *TALK]
    assert workflow("2+2").messages() == [{"role": "user", "content": "2+2"}]


def test_judges_read_their_contents() -> None:
    assert workflow(TALK).column("prompt_key") == "1+1\n\n2\n\n2+2"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], r"task\.prompt: must end with a user's message"),
        (TALK[:2], r"task\.prompt: must end with a user's message"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"task\.prompt: has no role .* in message 0"),
        ([*TALK, "2+2"], r"task\.prompt: has no role .* in message 3"),
    ],
)
def test_what_is_no_conversation_is_refused(prompt: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        workflow(prompt).messages()


@pytest.mark.parametrize(
    ("truth", "right"),
    [("4", ["4"]), (4, ["4"]), (["4", "IV", 4.5], ["4", "IV", "4.5"]), ([["a"], "b"], ["a", "b"])],
)
async def test_a_reply_is_right_if_it_matches_any_answer(truth: Any, right: list[str]) -> None:
    made = workflow(TALK)
    made.row["response"] = truth
    made.tools = Toolbox(lambda _: "4", scored=lambda _, answer: Score(float(answer.response == answer.truth), {}))
    asked = [made.answer("", reply, np.array([1]), False) for reply in (*right, "5", " or ".join(right) + "!")]
    assert [score.reward for score in await made.scores(asked)] == [*[1.0] * len(right), 0.0, 0.0]
    assert made.truth() == " or ".join(right)


@pytest.mark.parametrize("truth", [None, True, {"target": ["4"]}, [None], float("nan")])
def test_what_is_no_answer_is_refused(truth: Any) -> None:
    made = workflow(TALK)
    made.row["response"] = truth
    with pytest.raises(InvalidInput, match=r"task\.response: is .*, must be text or a list of texts"):
        made.truth()
