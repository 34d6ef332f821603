"""Templates and environments that rewrite history, and environments that say how a reply is sampled."""

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from support.fakes.explorers.toolbox import Corridor, Toolbox, make_episode_task, play, right, turns
from trinity.config import make_plan
from trinity.config.load import parse
from trinity.data.templates import refuse_rewritten_history
from trinity.explorer.workflows.single_turn import SimpleWorkflow
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Answer, Response, Score

pytestmark = pytest.mark.core


async def test_a_template_that_rewrites_history_is_refused_unless_turns_are_experiences_of_their_own() -> None:
    tools = Toolbox(right, history_problem="it leaves out what was thought in former turns")
    with pytest.raises(InvalidInput, match=r"step_wise: true"):
        await play(tools)
    made = await play(tools, n=1, step_wise=True)
    assert [e.step for e in made] == [0, 1]
    assert tools.prompts[1] == made[1].token_ids[: made[1].prompt_length].tolist(), "the prompt it was sampled after"


async def test_environments_and_scorers_see_the_whole_reply_and_training_the_sampled_tokens() -> None:
    seen: list[str] = []

    class Listening(Corridor):
        async def step(self, action: str) -> Answer:
            seen.append(action)
            return await super().step(action)

    def scored(_: str, answer: Response) -> Score:
        seen.append(answer.response)
        return Score(1.0, {})

    tools = Toolbox(lambda _: "A</think>right", {"corridor": Listening}, scored=scored, opened="<think>")
    plain = Toolbox(lambda _: "A</think>right")
    made, expected = await play(tools, n=1), await play(plain, n=1)
    assert set(seen) == {"<think>A</think>right"}
    assert made[0].response_text.startswith("[assistant] <think>A</think>right")
    assert made[0].token_ids.tolist() == expected[0].token_ids.tolist()
    assert made[0].logprobs.tolist() == expected[0].logprobs.tolist()
    seen.clear()
    (single,) = await SimpleWorkflow(make_episode_task("{}", 1, row_json='{"prompt": "?", "answer": "4"}',
        format={"prompt_key": "prompt", "response_key": "answer"}), tools).run()  # fmt: skip
    assert seen == [single.response_text] == ["<think>A</think>right"]


@pytest.mark.parametrize(
    ("workflow", "args", "refused"),
    [
        ("sokoban_workflow", {}, True),
        ("R3L_sokoban_workflow", {}, True),
        ("tool_call_workflow", {}, True),
        ("sokoban_workflow", {"step_wise": True}, False),
        ("step_wise_alfworld_workflow", {}, False),
        ("math_workflow", {}, False),
    ],
)
def test_an_explorer_refuses_a_template_that_rewrites_history_before_it_samples(
    workflow: str, args: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    test = {"name": "test", "path": "x.jsonl", "default_workflow_type": workflow, "workflow_args": args}
    values = {
        "project": "p",
        "name": "n",
        "checkpoint_root_dir": str(tmp_path),
        "model": {"model_path": "m"},
        "buffer": {"explorer_input": {"taskset": {"name": "train", "path": "y.jsonl"}, "eval_tasksets": [test]}},
    }
    plan = make_plan(parse(json.dumps(values)))
    refuse_rewritten_history(plan, "")
    if refused:
        with pytest.raises(InvalidInput, match=f"{workflow} of taskset test makes one sequence of several turns"):
            refuse_rewritten_history(plan, "it leaves out what was thought in former turns")
    else:
        refuse_rewritten_history(plan, "it leaves out what was thought in former turns")


class Rewriting(Corridor):
    """Says after its first step that the conversation is a new one."""

    async def step(self, action: str) -> Answer:
        answer = await super().step(action)
        info = {"conversation": "new", "instructions": "Be short."} if self.steps == 1 else {}
        return dataclasses.replace(answer, info_json=json.dumps(info))


async def test_a_new_conversation_has_nothing_of_the_one_before() -> None:
    tools = Toolbox(right, {"corridor": Rewriting})
    first, second, third = await play(
        tools, make_episode_task('{"environment": "corridor", "step_wise": true}', 1, row_json='{"length": 3}')
    )
    assert turns(second.token_ids.tolist())[:2] == [("system", "Be short."), ("user", "You are at 1 of 3.")]
    assert [said for _, said in turns(third.token_ids.tolist())] == [
        "Be short.",
        "You are at 1 of 3.",
        "right",
        "You are at 2 of 3.",
        "right",
    ]
    assert (first.prompt_length, second.action_mask.all(), third.action_mask.all()) == (first.prompt_length, True, True)
    assert third.metrics["response_tokens"] == sum(len(e.token_ids) - e.prompt_length for e in (first, second, third))


async def test_a_new_conversation_is_refused_where_turns_make_one_sequence() -> None:
    with pytest.raises(InvalidInput, match=r"step_wise: is false, but corridor began a new conversation"):
        await play(Toolbox(right, {"corridor": Rewriting}))


class Choosy(Corridor):
    """Asks for a reply of its own kind to its first observation."""

    wanted: ClassVar[Any] = {"temperature": 0.5, "max_tokens": 5, "stop": ["END"]}

    async def reset(self) -> Answer:
        answer = await super().reset()
        return dataclasses.replace(answer, info_json=json.dumps({**answer.info, "sampling": self.wanted}))


async def test_an_environment_says_how_the_next_reply_is_sampled() -> None:
    tools = Toolbox(right, {"corridor": Choosy})
    asked, generate = [], tools.generate

    async def watched(prompt: Any, sampling: Any, images: Any = ()) -> Any:
        asked.append((sampling.temperature, sampling.max_tokens, sampling.stop))
        return await generate(prompt, sampling)

    tools.generate = watched  # type: ignore[method-assign]
    (made,) = await play(tools, n=1)
    own = make_episode_task().sampling
    assert asked == [(0.5, 5, ("END",)), (own.temperature, own.max_tokens, own.stop)]
    trained = made.token_ids[made.prompt_length :][made.action_mask].tolist()
    assert turns([3, *trained]) == [("assistant", "right")], "what another temperature sampled is not trained"


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ("hot", "info.sampling"),
        ({"temperature": -1}, "info.sampling.temperature"),
        ({"max_tokens": 0}, "info.sampling.max_tokens"),
        ({"stop": "END"}, "info.sampling.stop"),
    ],
)
async def test_a_sampling_that_no_engine_takes_is_refused(wanted: Any, field: str) -> None:
    kind = type("Wrong", (Choosy,), {"wanted": wanted})
    with pytest.raises(InvalidInput) as refused:
        await play(Toolbox(right, {"corridor": kind}))
    assert refused.value.field == field
