"""The bridge to verifiers' classic interface, on the real package: prompts, turns, tools, rubrics, errors, ends."""

import asyncio
import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("verifiers.rubrics", reason="verifiers below 0.4 is not installed: pip install -e '.[verifiers]'")

from support.fakes.environments import verifiers_games
from support.fakes.environments.playing import NONSENSE, Played, play
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.environments.allowed import MODULES_VARIABLE
from trinity.environments.bridges.asked_policy import AskedPolicy
from trinity.environments.bridges.messages import assistant, news
from trinity.environments.bridges.verifiers import Verifiers
from trinity.environments.bridges.verifiers_classic import client as client_of
from trinity.runtime.errors import InvalidInput, Unavailable
from trinity.sdk.serve import serving

pytestmark = pytest.mark.core

NAME = "verifiers_games"
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a package by its own name, where verifiers looks for it."""
    monkeypatch.syspath_prepend(str(Path(verifiers_games.__file__).parent))
    monkeypatch.setitem(sys.modules, NAME, verifiers_games)
    monkeypatch.setenv(MODULES_VARIABLE, f"{NAME}, verifiers_tasksets, json, not_there_at_all")


def episode(kind: str, replies: list[str], row: dict[str, Any] | None = None, **args: Any) -> Played:
    options = {"kind": kind} | args.pop("env_args", {})
    return play(Verifiers(), replies, row or {"index": 0}, {"env_id": NAME, "env_args": options, **args})


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"


def by_itself(kind: str, replies: list[str], index: int = 0) -> Any:
    """The result of verifiers itself for the same replies."""
    environment = verifiers_games.load_environment(kind)

    async def run() -> Any:
        policy = AskedPolicy()

        async def answer() -> None:
            for reply in replies:
                question = await policy.questions.get()
                question.answer.set_result(assistant(reply, bool(question.tools)))

        answering = asyncio.create_task(answer())
        client = client_of(environment, policy)
        row = dict(environment.get_dataset()[index])
        try:
            return await environment.run_rollout(row, client, "model", {})
        finally:
            answering.cancel()

    kept = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        return asyncio.run(run())
    finally:
        for number, handler in kept:
            signal.signal(number, handler)


def test_one_turn_is_a_prompt_and_the_rubrics_reward() -> None:
    played = episode("sums", ["2"])
    first = played.observations[0]
    assert first.info["instructions"] == "Answer with a number."
    assert first.text == "Answer with a number.\n\nWhat is 1 + 1?"
    assert played.reward == 1.5
    assert played.won
    metrics = played.last.metrics
    assert (metrics["rubric_exact"], metrics["rubric_half_for_short"], metrics["rubric_num_turns"]) == (1, 1, 1)


def test_a_dataset_may_have_texts_as_prompts() -> None:
    played = episode("texts", ["2"])
    assert (played.observations[0].text, played.reward) == ("What is 1 + 1?", 1.5)


def test_a_wrong_answer_is_no_success() -> None:
    played = episode("sums", ["3"])
    assert (played.reward, played.won, played.last.done) == (0.5, False, True)


def test_several_turns_are_told_only_what_is_new() -> None:
    played = episode("guess", ["1", "9", "4"], {"index": 1})
    assert [o.info["observation"] for o in played.observations] == [
        "What is 2 + 2?",
        "It is higher.",
        "It is lower.",
        "Right.",
    ]
    assert [o.reward for o in played.observations] == [0, 0, 0, pytest.approx(1 / 3)]


@pytest.mark.parametrize(
    ("kind", "replies"),
    [
        ("sums", ["2"]),
        ("sums", ["<think>1</think> three"]),
        ("guess", ["1", "2"]),
        ("guess", ["1", "1", "1", "1"]),
        ("tools", [call(a=1, b=1), "2"]),
    ],
)
def test_the_reward_is_the_one_that_verifiers_gives_by_itself(kind: str, replies: list[str]) -> None:
    played, output = episode(kind, replies), by_itself(kind, replies)
    assert played.last.done
    assert played.reward == pytest.approx(output["reward"])
    for name, value in output["metrics"].items():
        assert played.last.metrics[f"rubric_{name}"] == value


def test_tools_are_called_and_listed() -> None:
    played = episode("tools", [f"Let me see. {call(a=1, b=1)}", "2"])
    (tool,) = played.observations[0].info["tools"]
    assert (tool["name"], tool["parameters"]["required"]) == ("add", ["a", "b"])
    assert '"name": "add"' in played.observations[0].text
    assert played.observations[1].text == "<tool_response>\n2\n</tool_response>"
    assert played.last.metrics["rubric_add_calls"] == 1
    assert played.won


@pytest.mark.parametrize("bad", ["<tool_call>{</tool_call>", "<tool_call>" * 50, call(a=1), "<tool_call>" + "[" * 9000])
def test_a_call_that_cannot_be_made_is_told(bad: str) -> None:
    played = episode("tools", [bad, "2"])
    assert "<tool_response>" in played.observations[1].text
    assert played.won


def test_errors_that_the_policy_causes_are_scored() -> None:
    played = episode("tools", ["so " + call(a="x", b=1)], env_args={"strict": True})
    assert (played.last.done, played.reward) == (True, 0.5), "a short answer, though a wrong one"


def test_errors_of_the_machine_fail_the_episode() -> None:
    with pytest.raises(Unavailable, match="the machine is gone"):
        episode("guess", ["1", "crash"])


def test_a_conversation_over_the_limit_is_scored_as_it_stands() -> None:
    played = episode("guess", ["1"] * 9, {"index": 1}, max_steps=2)
    assert (played.last.done, len(played.observations), played.reward) == (True, 3, 0)
    assert played.last.metrics["rubric_num_turns"] == 2


def test_a_closed_episode_leaves_nothing_behind() -> None:
    verifiers_games.closed.clear()
    episode("guess", ["1"], {"index": 2})
    assert verifiers_games.closed == ["6"]


def test_a_rewritten_history_is_a_new_conversation() -> None:
    played = episode("rewrites", ["twice oneEND and more", "2"])
    _, second, last = played.observations
    assert second.text == "Summary: twice one. Answer."
    assert (second.info["conversation"], second.info["instructions"]) == ("new", "Be short.")
    assert "conversation" not in last.info
    assert played.reward == 1


def test_what_follows_on_the_reply_is_no_new_conversation() -> None:
    asked = [{"role": "user", "content": "a"}]
    reply = assistant("b", False)
    more = [*asked, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert news(asked, reply, more) == "c"
    assert news(asked, assistant("other", False), more) is None
    assert news([{"role": "user", "content": "z"}], reply, more) is None
    assert news(asked, reply, asked) is None
    assert (news("a", reply, "abc"), news("a", reply, "xbc"), news("a", reply, more)) == ("c", None, None)


def test_requests_say_how_a_reply_is_sampled_and_where_it_stops() -> None:
    played = episode("rewrites", ["one", "2"])
    first, second, last = played.observations
    wanted = {"temperature": 0.25, "max_tokens": 7, "stop": ["END"]}
    assert (first.info["sampling"], second.info["sampling"]) == (wanted, wanted)
    assert "sampling" not in last.info
    assert "sampling" not in episode("sums", ["2"]).observations[0].info


def completion(replies: list[str], **body: Any) -> Any:
    """What a program's own request gets."""

    async def ask() -> Any:
        policy = AskedPolicy()
        asking = asyncio.create_task(
            policy.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}], **body)
        )
        for reply in replies:
            question = asyncio.create_task(policy.questions.get())
            await asyncio.wait([question, asking], return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                break
            question.result().answer.set_result(assistant(reply, False))
        return await asking

    return asyncio.run(ask())


def test_n_replies_are_asked_for_one_after_the_other() -> None:
    found = completion(["a", "b", "c"], n=3)
    assert [(one.index, one.message.content) for one in found.choices] == [(0, "a"), (1, "b"), (2, "c")]


@pytest.mark.parametrize(
    "body", [{"n": 0}, {"n": 17}, {"temperature": -1}, {"temperature": "hot"}, {"max_tokens": 0}, {"stop": [""]}]
)
def test_a_request_that_no_engine_takes_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=rf"^{next(iter(body))}: is "):
        completion(["a"], **body)


def test_few_shot_examples_say_who_spoke() -> None:
    text = episode("shots", []).last.text
    assert text.endswith("User: What is 0 + 0?\n\nAssistant: 0\n\nUser: What is 1 + 1?")


@pytest.mark.parametrize(
    "row",
    [
        {"question": "What is 5 + 5?", "answer": "10"},
        {"prompt": "What is 5 + 5?", "answer": "10"},
        {"prompt": [{"role": "user", "content": "What is 5 + 5?"}], "answer": "10"},
    ],
)
def test_a_row_may_bring_its_own_question(row: dict[str, Any]) -> None:
    played = episode("sums", ["10"], row)
    assert played.observations[0].text == "Answer with a number.\n\nWhat is 5 + 5?"
    assert played.won


@pytest.mark.parametrize("reply", [*NONSENSE, "9" * 100_001, "((((" * 5000, "\u0669" * 30])
def test_no_reply_breaks_an_episode(reply: str) -> None:
    played = episode("guess", [reply, "2"])
    assert played.last.done
    assert played.reward == (1.0 if played.last.metrics["invalid_format"] else 0.5), "won with the second"


@pytest.mark.parametrize(
    ("row", "args", "field"),
    [
        ({"index": 0}, {"env_id": "os; rm"}, "args.env_id"),
        ({"index": 0}, {"env_id": "json.tool"}, "args.env_id"),
        ({"index": 0}, {"env_id": "json"}, "args.env_id"),
        ({"index": 0}, {"env_id": "not-there-at-all"}, "args.env_id"),
        ({"index": 0}, {"env_id": NAME, "env_args": {"nope": 1}}, "args.env_id"),
        ({"index": 0}, {}, "args.env_id"),
        ({"index": 3}, {"env_id": NAME}, "task.index"),
        ({}, {"env_id": NAME}, "task.index"),
        ({"index": 0}, {"env_id": NAME, "splitt": "eval"}, "args.splitt"),
        ({"prompt": PICTURE}, {"env_id": NAME}, "prompt"),
    ],
)
def test_what_cannot_be_played_is_refused(row: dict[str, Any], args: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        play(Verifiers(), [], row, args)
    assert refused.value.field == field


def test_the_process_keeps_its_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    episode("sums", ["2"], env_args={"max_turns": 7})
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_check_in_another_thread_begins_an_episode() -> None:
    with ThreadPoolExecutor(1) as other:
        assert other.submit(episode, "sums", ["2"], env_args={"max_turns": 8}).result(60).won


def test_a_taskset_of_the_v1_interface_is_refused_with_the_version_that_it_needs() -> None:
    with pytest.raises(InvalidInput, match=r"tasksets of the v1 interface need verifiers>=0\.4"):
        play(Verifiers(), [], {"index": 0}, {"env_id": "verifiers_tasksets"})


async def test_a_worker_process_plays_it_for_a_client() -> None:
    async with serving(Verifiers) as address, grpc.aio.insecure_channel(address) as channel:
        stream = environment_pb2_grpc.EnvironmentServiceStub(channel).Episode(timeout=100)
        args = json.dumps({"env_id": NAME, "env_args": {"kind": "guess"}})
        await stream.write(
            pb.EpisodeRequest(reset=pb.Reset(environment="verifiers", task_json='{"index": 1}', args_json=args))
        )
        assert (await stream.read()).observation == "What is 2 + 2?"
        await stream.write(pb.EpisodeRequest(action=pb.Action(text="4", turn=1)))
        last = await stream.read()
        assert (last.done, last.reward, last.metrics["success"]) == (True, 1, 1)
