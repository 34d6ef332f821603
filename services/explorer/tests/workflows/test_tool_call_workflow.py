"""Tool calls: what is called, what the policy reads, what is trained, and what is counted."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.fakes.explorers.toolbox import Corridor, Toolbox, make_episode_task, turns
from trinity import plugins
from trinity.data.experience import Experience
from trinity.explorer.workflows import tool_calls
from trinity.explorer.workflows.tool_calls import ToolCallWorkflow, read_calls
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Answer, Response, Score

pytestmark = pytest.mark.core

Seen = list[tuple[str, str]]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(autouse=True)
def functions() -> Iterator[None]:
    number = {"type": "number"}

    @plugins.tool("add", "Adds two numbers.", {"a": number, "b": number})
    def add(a: float, b: float) -> float:
        return a + b

    @plugins.tool("sleep", "Sleeps.", {})
    def sleep() -> None:
        time.sleep(0.5)

    @plugins.tool("leave", "Leaves.", {})
    def leave() -> None:
        raise SystemExit(3)

    @plugins.tool("echo", "Echoes.", {})
    def echo(text: str) -> str:
        return text

    yield
    for name in ("add", "sleep", "leave", "echo"):
        del plugins.TOOLS[name], plugins._TOOL_FUNCTIONS[name]


def answering(first: str) -> Any:
    """Says `first`, and then what the tools said."""

    def policy(seen: Seen) -> str:
        results = [text for role, text in seen if role in ("tool", "user")]
        return first if len(results) == 1 else f"answer: {results[-1]}"

    return policy


async def run(box: Toolbox, n: int = 1, **args: Any) -> list[Experience]:
    given = json.dumps({"tools": ["add", "sleep", "leave", "echo"], **args})
    row = json.dumps({"prompt": "What is 2 and 3?", "response": "5"})
    made = await ToolCallWorkflow(make_episode_task(given, n, row_json=row, max_tokens=200), box).run()
    for index, experience in enumerate(made):
        experience.check(f"experience {index}")
    return made


def right(scorer: str, answer: Response) -> Score:
    return Score(float(answer.truth in answer.response), {})


def box(policy: Any, **more: Any) -> Toolbox:
    return Toolbox(policy, scored=right, **more)


async def test_a_call_is_answered_and_the_answer_is_scored() -> None:
    tools = box(answering(call("add", a=2, b=3)))
    made = await run(tools, n=2)
    assert [e.reward for e in made] == [1, 1]
    assert made[0].metrics["tool_calls"] == 1
    assert made[0].metrics["turns"] == 2
    said = turns(made[0].token_ids.tolist())
    assert said[-2:] == [("tool", "5"), ("assistant", "answer: 5")]
    response = made[0].token_ids[made[0].prompt_length :]
    trained = turns([3, *response[made[0].action_mask].tolist()])[0][1]
    assert trained == call("add", a=2, b=3) + "answer: 5", "what a tool said is not trained"
    schema = tools.schemas[0][0]["function"]
    assert (schema["name"], schema["parameters"]["required"]) == ("add", ["a", "b"])


async def test_half_a_character_in_a_result_is_replaced() -> None:
    (made,) = await run(box(answering(call("echo", text="a\ud83d"))))
    assert turns(made.token_ids.tolist())[-2:] == [("tool", "a?"), ("assistant", "answer: a?")]


@pytest.mark.parametrize(
    ("said", "result", "metric"),
    [
        ("<tool_call>{nonsense</tool_call>", "Error: the call is not JSON", "bad_calls"),
        ('<tool_call>{"name": "add"}', "Error: the call has no </tool_call>", "bad_calls"),
        ("<tool_call>[1]</tool_call>", "Error: a call is {", "bad_calls"),
        (call("add", a=1), "Error: TypeError", "tool_errors"),
        (call("add", a="x", b=1), "Error: TypeError", "tool_errors"),
        (call("open"), "Error: there is no tool 'open'", "tool_errors"),
        (call("leave"), "Error: SystemExit: 3", "tool_errors"),
        (call("sleep"), "Error: sleep took longer than 0.1 s", "tool_errors"),
    ],
)
async def test_what_goes_wrong_is_told_to_the_policy_and_counted(said: str, result: str, metric: str) -> None:
    (made,) = await run(box(answering(said)), tool_timeout_seconds=0.1)
    assert turns(made.token_ids.tolist())[-2][1].startswith(result)
    assert made.metrics[metric] == 1


async def test_a_tool_that_hangs_uses_threads_of_its_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_calls, "_THREADS", 2)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    released = threading.Event()

    @plugins.tool("hang", "Hangs.", {})
    def hang() -> None:
        released.wait(60)

    try:
        made = await run(box(answering(call("hang"))), n=6, tools=["hang"], tool_timeout_seconds=0.2)
        assert [e.metrics["tool_errors"] for e in made] == [1] * 6
        assert sum(thread.name.startswith("tool-hang") for thread in threading.enumerate()) == 2
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(lambda: 5) == 5, "the explorer's own threads are free"
        (added,) = await run(box(answering(call("add", a=2, b=3))))
        assert added.reward == 1
    finally:
        released.set()
        tool_calls._threads.pop("hang").shutdown()
        del plugins.TOOLS["hang"], plugins._TOOL_FUNCTIONS["hang"]


async def test_turns_are_limited() -> None:
    (made,) = await run(box(lambda _: call("add", a=1, b=1)), max_turns=3)
    assert made.metrics["turns"] == 3
    assert made.metrics["tool_calls"] == 2, "no reply would read the results of the last calls"
    (made,) = await run(box(lambda _: call("add", a=1, b=1), max_model_tokens=700), max_turns=30)
    assert made.metrics["turns"] < 10


async def test_an_environment_may_offer_the_tools() -> None:
    class Calculator(Corridor):
        async def reset(self) -> Answer:
            listed = [{"name": "double", "description": "Doubles.", "input_schema": {"type": "object"}}]
            return Answer("", info_json=json.dumps({"tools": listed}))

        async def step(self, action: str) -> Answer:
            asked = json.loads(action.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            good = asked["name"] == "double"
            said = f"<tool_response>\n{2 * asked['arguments']['x'] if good else 'no such tool'}\n</tool_response>"
            return Answer(said, metrics={"tool_errors": float(not good)})

    tools = box(answering(call("double", x=2.5)), environments={"calculator": Calculator})
    (made,) = await run(tools, environment="calculator")
    assert made.reward == 1
    assert tools.schemas[0][0]["function"]["name"] == "double"
    assert tools.episodes[0].closed
    (made,) = await run(
        box(answering(call("treble", x=2.5)), environments={"calculator": Calculator}), environment="calculator"
    )
    assert made.metrics["tool_errors"] == 1
    with pytest.raises(InvalidInput, match="offers no tools"):
        await run(box(answering("")), environment="corridor")


async def test_a_template_without_tool_messages_gets_the_results_in_the_users() -> None:
    class Strict(Toolbox):
        def next_turn(self, messages: Any, images: Any = ()) -> list[int]:
            if any(m["role"] == "tool" for m in messages):
                raise InvalidInput("messages", "no tools here")
            return super().next_turn(messages)

    (made,) = await run(Strict(answering(call("add", a=2, b=3)), scored=right))
    assert turns(made.token_ids.tolist())[-2] == ("user", "<tool_response>\n5\n</tool_response>")


async def test_unknown_tools_and_arguments_are_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"tools\.0: is 'multiply', must be a tool that .*; known: .*add"):
        await run(box(answering("")), tools=["multiply"])
    with pytest.raises(InvalidInput, match=r"workflow_args\.max_turn: unknown key"):
        await run(box(answering("")), max_turn=3)
    for args in ({"tools": "add"}, {"max_turns": 0}, {"tool_timeout_seconds": 0}, {"environment_args": []}):
        with pytest.raises(InvalidInput, match=rf"workflow_args\.{min(args)}: is "):
            await run(box(answering("")), **args)


def test_many_calls_in_one_reply_are_read_up_to_a_limit() -> None:
    assert len(read_calls(call("add", a=1, b=1) * 1000)) == 8
    assert read_calls("<tool_call>" * 100_000)[0].problem
