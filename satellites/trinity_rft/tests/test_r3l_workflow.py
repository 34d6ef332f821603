"""R3L: what is reflected on, retried and from where, what is trained of it, in which group, and what is counted."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from support.fakes.explorers.toolbox import Corridor, Toolbox, make_episode_task, turns
from trinity.compat_rft import r3l, reflection
from trinity.compat_rft.r3l import R3L_WORKFLOWS, ReflectRetryWorkflow
from trinity.config.workflows import EpisodeRules
from trinity.data.experience import Experience, TaskKind
from trinity.explorer.workflows.conversation import Conversation
from trinity.explorer.workflows.episode import Episode, Turn
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Answer

pytestmark = pytest.mark.core

Seen = list[tuple[str, str]]


def report(step: int = 1, outcome: str = "failure", **changes: Any) -> str:
    found = {
        "trajectory_summary": "It turned round.",
        "root_cause_analysis": "It went left.",
        "trajectory_outcome": outcome,
        "improvement_suggestion": "Go right.",
        "retry_from_step": step,
        **changes,
    }
    return f"Here it is: {json.dumps(found)} done"


def policy(said: str, unguided: str = "left") -> Any:
    """First right, then `unguided`; right all the way where guidance is in sight. Reflections are `said`."""

    def reply(seen: Seen) -> str:
        if seen[0][1].startswith("You review"):
            return said
        begun = any(role == "assistant" and text for role, text in seen[:-1])
        guided = any("Go right." in text for _, text in seen)
        return "right" if guided or not begun else unguided

    return reply


async def play(tools: Toolbox, n: int = 2, workflow: Any = ReflectRetryWorkflow, **args: Any) -> list[Experience]:
    given = {"environment": "corridor", **args} if workflow is ReflectRetryWorkflow else args
    task = make_episode_task(json.dumps(given), n, row_json='{"length": 3}', max_tokens=600)
    made = await workflow(task, tools).run()
    for index, experience in enumerate(made):
        experience.check(f"experience {index}")
    assert [e.rollout for e in made] == list(range(len(made)))
    return made


def trained(experience: Experience) -> str:
    """The text of the trained tokens."""
    response = experience.token_ids[experience.prompt_length :]
    return "".join(text for _, text in turns([3, *response[experience.action_mask].tolist()]))


def group_of(experience: Experience) -> str:
    return json.loads(experience.info_json or "{}").get("group", "")


async def test_a_retry_begins_at_the_chosen_step_and_is_trained_without_guidance() -> None:
    tools = Toolbox(policy(report(1)))
    first, second, reflected, guided = await play(tools)

    assert (first.reward, second.reward) == (0.0, 1.0)
    said = turns(second.token_ids.tolist())
    assert not any("Go right." in text for _, text in said), "distilled"
    assert [text for role, text in said if role == "assistant"] == ["right", "right", "right"]
    assert said[:4] == turns(first.token_ids.tolist())[:4], "the first step is replayed, token by token"
    assert json.loads(second.info_json) == {"distilled": True, "retry_from_step": 1}

    told = turns(guided.token_ids.tolist())
    assert ("system", reflection.read(report(1), 3).guidance) in told  # type: ignore[union-attr]
    assert [text for role, text in told if role == "assistant"] == ["right", "right", "right"]
    assert turns(reflected.token_ids.tolist())[-1] == ("assistant", report(1))


async def test_pivotal_credit_leaves_the_shared_turns_out_of_both_attempts() -> None:
    first, second, reflected, guided = await play(Toolbox(policy(report(1))))
    assert trained(first) == "left" * 7
    assert trained(second) == "rightright"
    assert trained(guided) == "rightright"
    assert trained(reflected) == report(1)


async def test_replies_at_another_temperature_are_trained_in_no_attempt() -> None:
    class Hot(Corridor):
        """Asks for another temperature where it is at 1."""

        async def step(self, action: str) -> Answer:
            found = await super().step(action)
            return replace(found, info_json='{"sampling": {"temperature": 0.5}}' if self.at == 1 else "")

    _, second, _, guided = await play(Toolbox(policy(report(1)), {"corridor": Hot}))
    assert trained(second) == trained(guided) == "right"
    assert len(second.token_ids) < len(guided.token_ids)


async def test_reflection_and_guided_retry_are_groups_of_their_own_with_reward_1() -> None:
    made = await play(Toolbox(policy(report(1))), n=4)
    assert [group_of(e) for e in made] == ["", "", "reflect_0", "retry_0", "", "", "reflect_1", "retry_1"]
    assert [e.reward for e in made] == [0, 1, 1, 1, 0, 1, 1, 1]


async def test_metrics_are_those_of_the_reference() -> None:
    first, second, reflected, guided = await play(Toolbox(policy(report(1))))
    assert (first.metrics["success"], first.metrics["steps"], first.metrics["reflect_valid"]) == (0, 8, 1)
    assert second.metrics == {
        "second_success": 1.0,
        "second_steps": 3.0,
        "second_reward": 1.0,
        "second_improve": 1.0,
        "second_reward_diff": 1.0,
        "retry_from_step": 1.0,
        "replay_differs": 0.0,
    }
    assert not reflected.metrics, "rollout metrics count attempts alone"
    assert not guided.metrics


async def test_a_retry_from_the_beginning_has_the_guidance_in_its_system_prompt() -> None:
    tools = Toolbox(policy(report(0)))
    first, second, _, guided = await play(tools)
    head = turns(guided.token_ids[: guided.prompt_length].tolist())
    assert head[0][0] == "system"
    assert head[0][1].startswith("Walk to the end.\n\nAn earlier attempt")
    assert turns(second.token_ids.tolist())[0] == ("system", "Walk to the end.")
    assert trained(first).startswith("right")
    assert trained(second) == "rightrightright"


async def test_a_retry_that_is_no_better_trains_neither_reflection_nor_guidance() -> None:
    made = await play(Toolbox(policy(report(1, improvement_suggestion="Go left."))))
    assert [group_of(e) for e in made] == ["", ""]
    assert made[1].metrics["second_improve"] == 0
    assert made[1].metrics["second_reward_diff"] == 0


async def test_a_success_that_is_reflected_upon_as_one_trains_the_reflection() -> None:
    made = await play(Toolbox(policy(report(1, outcome="success"), unguided="right")))
    assert [group_of(e) for e in made] == ["", "", "reflect_0"]
    assert [e.reward for e in made] == [1, 1, 1]
    assert trained(made[0]) == trained(made[1]) == "right" * 3
    assert "second_success" not in made[1].metrics


@pytest.mark.parametrize(
    "said",
    [
        "no report",
        "{" * 500,
        "[" * 500 + "{}",
        report(8),
        report(-1),
        report(True),
        report(outcome="fine"),
        report(improvement_suggestion=""),
        report(root_cause_analysis=3),
    ],
)
async def test_without_a_report_that_can_be_used_the_second_attempt_is_a_plain_one(said: str) -> None:
    made = await play(Toolbox(policy(said)))
    assert [group_of(e) for e in made] == ["", ""]
    assert made[0].metrics["reflect_valid"] == 0
    assert trained(made[0]) == trained(made[1])
    assert made[1].metrics["steps"] == 8


async def test_a_replay_that_ends_early_gives_a_plain_second_attempt() -> None:
    class Moody(Corridor):
        made = 0

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            type(self).made += 1
            self.second = type(self).made == 2

        async def step(self, action: str) -> Answer:
            found = await super().step(action)
            return Answer("It is over.", done=True) if self.second else found

    made = await play(Toolbox(policy(report(3)), {"corridor": Moody}))
    assert [group_of(e) for e in made] == ["", ""]
    assert Moody.made == 3


@pytest.mark.parametrize("step", [0, 1])
async def test_guidance_that_does_not_fit_gives_a_plain_second_attempt(step: int) -> None:
    long = report(step, improvement_suggestion="Go right. " * 200)
    task = make_episode_task('{"environment": "corridor", "max_context_tokens": 700}', 2, max_tokens=10)
    tools = Toolbox(policy(long), max_model_tokens=6000)
    made = await ReflectRetryWorkflow(task, tools).run()
    assert [group_of(e) for e in made] == ["", ""]
    assert made[0].metrics["reflect_valid"] == 1
    assert "second_success" not in made[1].metrics


async def test_a_replay_that_diverges_is_counted_and_continues_from_what_is_seen() -> None:
    class Renamed(Corridor):
        made = 0

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            type(self).made += 1
            self.name = f"hall {type(self).made}"

        async def step(self, action: str) -> Answer:
            found = await super().step(action)
            return Answer(f"{self.name}: {found.observation}", found.reward, found.done, found.info, found.metrics)

    second = (await play(Toolbox(policy(report(1)), {"corridor": Renamed})))[1]
    assert second.metrics["replay_differs"] == 1
    assert turns(second.token_ids.tolist())[3][1].startswith("hall 2: ")


SCORES = (8, 17, 25, 33, 50, 58, 67, 75, 83, 92, 100)


class Laboratory(Corridor):
    """Pays what each step added to a score of 100, as ScienceWorld does: a sum of 0.9999999999999998."""

    measured = True

    async def step(self, action: str) -> Answer:
        paid = SCORES[self.at - 1] if self.at else 0
        self.steps += 1
        self.at += action == "right"
        score = SCORES[self.at - 1] if self.at else 0
        won = score == SCORES[-1]
        metrics = {"success": float(won)} if self.measured else {}
        return Answer(f"Step {self.at}.", (score - paid) / 100, won or self.steps >= 12, "", metrics)


class Unmeasured(Laboratory):
    measured = False


@pytest.mark.parametrize("kind", [Laboratory, Unmeasured])
async def test_a_reward_of_1_in_many_parts_has_won(kind: type[Laboratory]) -> None:
    made = await play(Toolbox(policy(report(1)), {"corridor": kind}, max_model_tokens=8000))
    assert made[1].reward == sum((b - a) / 100 for a, b in pairwise((0, *SCORES))) < 1
    assert [group_of(e) for e in made] == ["", "", "reflect_0", "retry_0"]
    assert made[1].metrics["second_success"] == 1


@pytest.mark.parametrize(
    ("first", "second", "improved"),
    [
        ((0.1, 0.2, 0.3), (0.3, 0.3), True),  # 0.6000000000000001 in three steps, 0.6 in two
        ((0.3, 0.3), (0.1, 0.2, 0.3), False),
        ((0.3,), (0.3, 0.1), True),
        ((0.3, 0.1), (0.3,), False),
    ],
)
def test_the_same_reward_is_the_same_however_it_was_added_up(
    first: tuple[float, ...], second: tuple[float, ...], improved: bool
) -> None:
    def played(rewards: tuple[float, ...]) -> Episode:
        made = Episode(EpisodeRules(), Conversation(()), [], "")
        made.turns = [Turn("", "", "", reward=reward) for reward in rewards]
        return made

    assert r3l._improved(played(first), played(second)) is improved


async def test_an_evaluation_plays_plain_episodes() -> None:
    task = make_episode_task('{"environment": "corridor"}', 2, kind=TaskKind.EVALUATION, row_json='{"length": 3}')
    made = await ReflectRetryWorkflow(task, Toolbox(policy(report(1)))).run()
    assert [e.metrics["success"] for e in made] == [0, 0]
    assert len(made) == 2


async def test_an_odd_rollout_is_a_plain_one() -> None:
    made = await play(Toolbox(policy("no report")), n=3)
    assert len(made) == 3


async def test_puzzles_are_always_tried_again_from_the_start() -> None:
    tools = Toolbox(policy(report(2)), {"countdown": Corridor})
    second = (await play(tools, workflow=R3L_WORKFLOWS["R3L_countdown_workflow"], max_turns=8))[1]
    assert second.metrics["retry_from_step"] == 0


async def test_second_attempts_may_have_environment_arguments_of_their_own() -> None:
    tools = Toolbox(policy(report(1)))
    await play(tools, environment_args={"a": 1}, retry_environment_args={"b": 2})
    assert [episode.args for episode in tools.episodes] == [{"a": 1}, {"a": 1, "b": 2}]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"step_wise": True}, r"workflow_args\.step_wise: is true"),
        ({"branches": {"turns": [1]}}, r"workflow_args\.branches: must be left out"),
        ({"retry_from": "end"}, r"workflow_args\.retry_from: is 'end', must be one of step, start"),
        ({"max_reflection_tokens": 0}, r"max_reflection_tokens: is 0, must be greater than or equal to 16"),
        ({"retry_environment_args": 3}, r"retry_environment_args: is 3, must be a mapping"),
    ],
)
def test_bad_arguments_are_refused_by_name(args: dict[str, Any], message: str) -> None:
    task = make_episode_task(json.dumps({"environment": "corridor", **args}))
    with pytest.raises(InvalidInput, match=message):
        ReflectRetryWorkflow(task, Toolbox(policy("")))


def test_a_template_without_system_messages_in_between_gets_the_guidance_in_the_users() -> None:
    import asyncio

    class Strict(Toolbox):
        def next_turn(self, messages: Any, images: Any = ()) -> list[int]:
            if any(m["role"] == "system" for m in messages):
                raise InvalidInput("messages", "system must be first")
            return super().next_turn(messages)

    guided = asyncio.run(play(Strict(policy(report(1)))))[3]
    told = turns(guided.token_ids.tolist())
    assert told[3][0] == "user"
    assert "Go right." in told[3][1]
    assert told[3][1].endswith("You are at 1 of 3.")
