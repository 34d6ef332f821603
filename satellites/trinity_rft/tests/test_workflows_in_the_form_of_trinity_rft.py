"""Workflows written for Trinity-RFT, as files of a plugin folder: what they return are trajectories as sampled."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from support.fakes.explorers.toolbox import END, Toolbox, encode, make_episode_task
from support.fakes.trinity_rft.loading import loaded
from trinity import plugins
from trinity.common.experience import Experience as Made
from trinity.common.workflows import WORKFLOWS, Workflow, WorkflowWithRecording
from trinity.data.experience import AttemptFailure, Experience, Group, TaskKind, Truncation
from trinity.explorer.rollout import attempt
from trinity.sdk.contract import Response, Score

pytestmark = pytest.mark.core

ROW = json.dumps({"question": "1+1", "answer": "2"})
FORMAT = {"prompt_key": "question", "response_key": "answer"}


@pytest.fixture(autouse=True)
def _files() -> Iterator[None]:
    with loaded("workflows"):
        yield


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers a workflow for one test."""

    def add(kind: type) -> str:
        monkeypatch.setitem(plugins.WORKFLOWS, "of_test", kind)
        return "of_test"

    return add


def replies(*texts: str) -> Any:
    left = list(texts)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


def task(workflow: str, **changes: Any) -> Any:
    values = {"row_json": ROW, "format": FORMAT, "reward_function": "last_number", "timeout_seconds": 60.0, **changes}
    return make_episode_task(workflow=workflow, **values)


async def explore(workflow: str, tools: Toolbox, **changes: Any) -> list[Experience]:
    group = await attempt.explore(task(workflow, **changes), 1, "me", tools)  # type: ignore[arg-type]
    assert isinstance(group, Group), group
    return list(group.experiences)


async def failure(workflow: str, tools: Toolbox, **changes: Any) -> str:
    found = await attempt.explore(task(workflow, **changes), 1, "me", tools)  # type: ignore[arg-type]
    assert isinstance(found, AttemptFailure)
    return found.error


def response(experience: Experience) -> list[int]:
    return experience.token_ids[experience.prompt_length :].tolist()


async def test_a_simple_workflow_with_a_reward_function_of_the_plugin() -> None:
    tools = Toolbox(replies("it is 2", "it is 3"))
    changes = {"reward_args_json": '{"bonus": 0.5}', "workflow_args_json": '{"hint": " = ?"}'}
    made = await explore("hinted_sums", tools, **changes)
    assert [(e.rollout, e.step, e.reward) for e in made] == [(0, 0, 1.5), (1, 0, 0.5)]
    assert made[0].metrics["accuracy"] == 1 and made[0].metrics["form"] == 0.5
    assert response(made[0]) == [*encode("it is 2"), END] and made[0].action_mask.all()
    assert (made[0].logprobs == np.float32(-0.5)).all()
    assert "1+1 = ?" in made[0].prompt_text and made[0].response_text == "it is 2"
    assert len(tools.prompts) == 1, "one question for all rollouts"


async def test_an_asynchronous_workflow_runs_once_for_each_rollout() -> None:
    made = await explore("best_of_two", Toolbox(replies("3", "2", "4", "2")))
    assert [(e.rollout, e.reward, e.metrics["best_of"]) for e in made] == [(0, 1.0, 2.0), (1, 1.0, 2.0)]
    assert [response(e) for e in made] == [[*encode("2"), END]] * 2


async def test_a_conversation_of_turns_is_trained_as_it_was_sampled() -> None:
    tools = Toolbox(lambda said: "2" if ("user", "Look again.") in said else "3")
    first, second = await explore("second_look", tools)
    told = tools.next_turn([{"role": "user", "content": "Look again."}])
    assert response(first) == [*encode("3"), END, *told[1:], *encode("2"), END]
    trained = [True] * 2 + [False] * (len(told) - 1) + [True] * 2
    assert first.action_mask.tolist() == trained
    assert (first.reward, first.metrics["turns"], "style" in first.metrics) == (1.0, 2.0, False)
    assert (first.rollout, second.rollout) == (0, 1)
    assert tools.prompts[-1][-len(told) :] == told, "the first reply is in the second prompt by its tokens"


async def test_a_conversation_with_tools_grows_by_tokens_too(registered: Any) -> None:
    schemas = [{"type": "function", "function": {"name": "add"}}]

    class Calls(Asks):
        def ask(self) -> list[Made]:
            messages = list(ASKED)
            for _ in range(2):
                (made,) = self.model.chat(messages, tools=schemas)
                messages += [{"role": "assistant", "content": made.response_text}, {"role": "tool", "content": "4"}]
            return [self.model.convert_messages_to_experience(messages, tools=schemas)]

    tools = Toolbox(replies("add", "4"))
    (made,) = await explore(registered(Calls), tools, n=1)
    told = tools.next_turn([{"role": "tool", "content": "4"}])
    assert response(made) == [*encode("add"), END, *told[1:], *encode("4"), END]
    assert tools.schemas == [schemas], "the second prompt is the first one's tokens and what was told"


async def test_replies_that_a_workflow_puts_together_are_found_again() -> None:
    made = await explore("stitched", Toolbox(replies("3", "2")))
    assert made[0].action_mask.tolist() == [True] * 2 + [False] * (made[0].response_length - 4) + [True] * 2
    assert (made[0].logprobs[made[0].action_mask] == np.float32(-0.5)).all()
    assert not made[0].logprobs[~made[0].action_mask].any()
    assert [(span.start, span.end) for span in made[0].version_spans] == [(0, made[0].response_length)]


async def test_a_built_in_reward_function_is_asked_with_the_replys_tokens() -> None:
    asked: list[tuple[str, Response]] = []

    def scored(name: str, answer: Response) -> Score:
        asked.append((name, answer))
        return Score(0.75, {"accuracy": 1.0, "other": 5.0})

    tools = Toolbox(replies("2"), scored=scored)
    made = await explore("hinted_sums", tools, reward_function="math_reward")
    assert [e.reward for e in made] == [0.75, 0.75] and made[0].metrics["reward"] == 0.75
    name, answer = asked[0]
    assert (name, answer.truth, answer.response_tokens) == ("math_reward", "2", 2)


async def test_classes_of_built_in_reward_functions_score_in_workflows(registered: Any) -> None:
    from trinity.common.rewards import MathBoxedRewardFn

    asked: list[Response] = []

    def scored(name: str, answer: Response) -> Score:
        asked.append(answer)
        found = {"accuracy": 1.5, "answered": 1.0, "format_score": 0.0}
        return Score(1.5, found) if name == "math_boxed_reward" else Score(0.0, {})

    class Boxed(Workflow):
        def run(self) -> list[Made]:
            (made,) = self.model.chat(ASKED)
            parts = MathBoxedRewardFn()(made.response_text, self.task.task_desc, truth=2, with_think=True)
            assert parts == {"accuracy": 1.5, "format_score": 0.0}
            made.reward = sum(parts.values())
            return [made]

    class Parses(Workflow):
        def run(self) -> list[Made]:
            return [MathBoxedRewardFn(answer_parser=str)("a")]  # type: ignore[list-item]

    (made,) = await explore(registered(Boxed), Toolbox(replies("abc"), scored=scored), n=1)
    assert made.reward == 1.5 and (asked[0].prompt, asked[0].truth, asked[0].response_tokens) == ("1+1", "2", 4)
    assert "takes no other answer_parser" in await failure(registered(Parses), Toolbox(replies("a")), n=1)
    with pytest.raises(plugins.PluginError, match="scores only in workflows"):
        MathBoxedRewardFn()("a")


async def test_an_attempt_that_is_over_ends_its_call_and_its_thread(registered: Any) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    class Hangs(Toolbox):
        async def generate(self, *args: Any) -> Any:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

    class Waits(Workflow):
        def run(self) -> list[Made]:
            try:
                return self.model.chat(ASKED)
            except Exception:
                return self.model.chat(ASKED)  # the second call is refused at once

    running = asyncio.create_task(failure(registered(Waits), Hangs(replies("a")), n=1, timeout_seconds=0.5))
    await begun.wait()
    thread = next(one for one in threading.enumerate() if one.name == "rft-workflow")
    assert "the attempt took longer" in await running
    await asyncio.wait_for(cancelled.wait(), 20)
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive()


async def test_an_evaluation_counts_each_rollout_once(registered: Any) -> None:
    class Steps(Workflow):
        def run(self) -> list[Made]:
            made = [self.model.chat([{"role": "user", "content": "go"}])[0] for _ in range(3)]
            for step, experience in enumerate(made):
                experience.reward = float(step)
            return made

    name = registered(Steps)
    train = await explore(name, Toolbox(replies("a")))
    assert [(e.rollout, e.step, e.reward) for e in train] == [(r, s, s) for r in (0, 1) for s in range(3)]
    evaluation = await explore(name, Toolbox(replies("a")), kind=TaskKind.EVALUATION)
    assert [(e.rollout, e.step, e.reward) for e in evaluation] == [(0, 0, 2.0), (1, 0, 2.0)]


class Asks(Workflow):
    """What a test asks of the model, as one rollout."""

    def run(self) -> list[Made]:
        made = self.ask()
        for experience in made:
            experience.reward = 1.0
        return made

    def ask(self) -> list[Made]:
        raise NotImplementedError


ASKED = [{"role": "user", "content": "go"}]


async def test_replies_at_another_temperature_are_context_alone(registered: Any) -> None:
    class Hot(Asks):
        def ask(self) -> list[Made]:
            return self.model.chat(ASKED, temperature=0.5) + self.model.chat(ASKED, temperature=1.0)

    made = await explore(registered(Hot), Toolbox(replies("a", "b")), n=1)
    assert [bool(e.action_mask.any()) for e in made] == [False, True]


async def test_texts_without_a_template_and_log_probabilities(registered: Any) -> None:
    found: list[list[float]] = []

    class Raw(Asks):
        def ask(self) -> list[Made]:
            made = self.model.generate(["xy"], max_tokens=3)
            found.append(self.model.logprobs(made[0].tokens.tolist()).tolist())
            assert self.model.extract_experience_from_history()[0].tokens.tolist() == made[0].tokens.tolist()
            assert self.model.extract_experience_from_history() == [], "a history is extracted once"
            return made

    (made,) = await explore(registered(Raw), Toolbox(lambda _: "z" * 9), n=1)
    assert made.token_ids.tolist() == [*encode("xy"), *encode("zzz")]
    assert made.truncation is Truncation.RESPONSE
    assert len(found[0]) == len(made.token_ids) - 1


async def test_a_prompt_that_is_too_long_is_cut_and_not_trained(registered: Any) -> None:
    class Long(Asks):
        def ask(self) -> list[Made]:
            (made,) = self.model.chat([{"role": "user", "content": "x" * 100}])
            assert made.truncate_status == "prompt_truncated"
            return [made]

    (made,) = await explore(registered(Long), Toolbox(replies("a"), max_model_tokens=50), n=1)
    assert made.truncation is Truncation.PROMPT and not made.action_mask.any()


async def test_auxiliary_models_are_asked_by_openais_client(registered: Any) -> None:
    class Graded(Workflow):
        def run(self) -> list[Made]:
            (made,) = self.model.chat(ASKED)
            (judge,) = self.auxiliary_models or ()
            said = [*ASKED, {"role": "user", "content": made.response_text}]
            done = judge.chat.completions.create(model=judge.model_path, messages=said, temperature=0.0, n=2)
            made.reward = sum(float(choice.message.content) for choice in done.choices)
            return [made]

    class Asynchronous(Workflow):
        is_async = True

        async def run_async(self) -> list[Made]:
            (made,) = await self.model.chat_async(ASKED)
            (judge,) = self.auxiliary_models or ()
            done = await judge.chat.completions.create(messages=ASKED, max_completion_tokens=5)
            made.reward = float(done.choices[0].message.content)
            return [made]

    for kind, reward in ((Graded, 3.0), (Asynchronous, 1.5)):
        tools = Toolbox(replies("a"), judged=lambda messages: "1.5")
        (made,) = await explore(registered(kind), tools, n=1)
        assert made.reward == reward and made.response_text == "a"


class Embeds(Asks):
    def ask(self) -> list[Made]:
        return self.auxiliary_models[0].embeddings  # type: ignore


class Unrecorded(WorkflowWithRecording):
    async def run_async(self) -> dict[str, float]:  # type: ignore[override]
        return {}


class Samples(WorkflowWithRecording):
    async def run_async(self) -> dict[str, float]:  # type: ignore[override]
        await self.update_reward(1.0, sample_ids=["a"])
        return {}


class Invents(Asks):
    def ask(self) -> list[Made]:
        (made,) = self.model.chat(ASKED)
        made.tokens[-2] += 1
        return [made]


class Retypes(Asks):
    def ask(self) -> list[Made]:
        self.model.chat(ASKED)
        return [self.model.convert_messages_to_experience([*ASKED, {"role": "assistant", "content": "typed"}])]


class Advantages(Asks):
    def ask(self) -> list[Made]:
        (made,) = self.model.chat(ASKED)
        made.advantages = [1.0]
        return [made]


class Misspells(Asks):
    def ask(self) -> list[Made]:
        return self.model.chat(ASKED, temprature=1.0)


class Images(Asks):
    def ask(self) -> list[Made]:
        return self.model.chat_mm(ASKED, {})  # type: ignore[no-any-return]


class Breaks(Asks):
    def ask(self) -> list[Made]:
        return [self.task.raw_task["nothing"]]


class Nothing(Asks):
    def ask(self) -> list[Made]:
        return []


class Unrewarded(Workflow):
    def run(self) -> list[Made]:
        return self.model.chat(ASKED)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Invents, "experience 0 trains response token 0, which no reply of self.model has"),
        (Retypes, "a reply in these messages is no text of self.model.chat's, and text is not tokenized again"),
        (Advantages, "experience 0 has advantages, which workflows cannot set"),
        (Misspells, "models take no 'temprature'"),
        (Images, "the model of a workflow has no 'chat_mm'"),
        (Embeds, "an auxiliary model has no 'embeddings'"),
        (Unrecorded, "nothing was recorded: base_url was not used"),
        (Samples, "update_reward takes no sample_ids"),
        (Breaks, "KeyError: 'nothing'"),
        (Nothing, "returned [], must be a list of experiences"),
        (Unrewarded, "experience 0 has no reward"),
    ],
)
async def test_what_cannot_be_mapped_is_a_failed_attempt_with_its_line(registered: Any, kind: type, said: str) -> None:
    found = await failure(registered(kind), Toolbox(replies("abc"), judged=lambda _: "1"), n=1)
    assert said in found
    assert f"{__file__}:" in found
    assert "docs/from_trinity.md#" in found or kind is Breaks


async def test_a_template_that_rewrites_history_allows_no_conversation_as_one_experience() -> None:
    tools = Toolbox(replies("3", "2"), history_problem="it leaves out what was thought in former turns")
    found = await failure("second_look", tools)
    assert "it leaves out what was thought in former turns" in found and "second_look.py:" in found


def test_names_are_taken_once_and_kinds_are_checked() -> None:
    for name, kind, said in (
        ("simple_workflow", Invents, "is built in"),
        ("mine", dict, "derive it from trinity.common.workflows.Workflow"),
        ("mine", type("Empty", (Workflow,), {}), "defines no run()"),
    ):
        with pytest.raises(plugins.PluginError, match=said.replace("(", r"\(").replace(")", r"\)")):
            WORKFLOWS.register_module(name)(kind)
    assert "mine" not in plugins.WORKFLOWS
