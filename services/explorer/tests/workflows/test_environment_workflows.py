"""Episodes played by workflows: what is trained, what ends them, what is counted, and that a failure is no reward."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from support.fakes.explorers.toolbox import Corridor, Toolbox, make_episode_task, play, right, turns
from trinity.data.experience import AttemptFailure, Group, TaskKind, Truncation
from trinity.explorer.environments.client import EnvironmentFailed
from trinity.explorer.rollout import attempt
from trinity.explorer.types import EngineFailed
from trinity.explorer.workflows.player import EPISODES
from trinity.runtime.errors import FailureCause, InvalidInput
from trinity.sdk.contract import Answer

pytestmark = pytest.mark.core


async def test_an_episode_is_one_experience_of_all_its_turns() -> None:
    tools = Toolbox(right)
    made = await play(tools)
    assert [(e.rollout, e.step, e.reward) for e in made] == [(0, 0, 1.0), (1, 0, 1.0)]
    assert turns(made[0].token_ids.tolist()) == [
        ("system", "Walk to the end."),
        ("user", "You are at 0 of 2."),
        ("assistant", "right"),
        ("user", "You are at 1 of 2."),
        ("assistant", "right"),
    ]
    trained = made[0].token_ids[made[0].prompt_length :][made[0].action_mask].tolist()
    assert turns([3, *trained]) == [("assistant", "rightright")]
    assert not made[0].logprobs[~made[0].action_mask].any()
    assert made[0].metrics["success"] == 1
    assert made[0].metrics["steps"] == 2
    assert made[0].metrics["end_done"] == 1
    assert made[0].truncation is Truncation.NONE
    assert all(episode.closed for episode in tools.episodes)


async def test_a_rows_system_message_wins_over_the_instructions() -> None:
    task = make_episode_task(
        '{"environment": "corridor", "system_prompt": "Go."}', 1,
        row_json='{"told": "Walk slowly."}', format={"system_prompt_key": "told", "system_prompt": "Run."},
    )  # fmt: skip
    (made,) = await play(Toolbox(right), task)
    assert turns(made.token_ids.tolist())[0] == ("system", "Walk slowly.")


async def test_the_rollouts_of_a_group_play_the_same_instance() -> None:
    tools = Toolbox(right)
    await play(tools, n=4)
    other = Toolbox(right)
    await play(other, make_episode_task('{"environment": "corridor"}', 1, row=7))
    assert len({episode.seed for episode in tools.episodes}) == 1
    assert other.episodes[0].seed != tools.episodes[0].seed
    given = Toolbox(right)
    await play(given, make_episode_task('{"environment": "corridor"}', 1, row_json='{"seed": 3}'))
    assert given.episodes[0].seed == 3


async def test_step_wise_every_turn_is_an_experience_with_its_own_reward_and_state() -> None:
    made = await play(Toolbox(right), step_wise=True)
    assert [(e.rollout, e.step) for e in made] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    facts = [json.loads(e.info_json) for e in made]
    assert [f["step_reward"] for f in facts] == [0, 1, 0, 1]
    assert facts[0]["env_state_hash"] == facts[2]["env_state_hash"] != facts[1]["env_state_hash"]
    assert [e.reward for e in made] == [1, 1, 1, 1], "an episode's reward is known to each of its steps"
    assert made[1].action_mask.all()
    assert turns(made[1].token_ids[: made[1].prompt_length].tolist())[-2] == ("user", "You are at 1 of 2.")
    assert [bool(e.metrics) for e in made] == [False, True, False, True], "an episode is measured once"


async def test_an_evaluation_counts_episodes_and_not_turns() -> None:
    task = make_episode_task('{"environment": "corridor", "step_wise": true}', 3, kind=TaskKind.EVALUATION)
    made = await play(Toolbox(right), task)
    assert [e.metrics["success"] for e in made] == [1, 1, 1]


@pytest.mark.parametrize(
    ("reply", "args", "end", "reward"),
    [
        ("left", {"max_turns": 3}, "end_turn_limit", 0.0),
        ("left", {"max_context_tokens": 120}, "end_context_limit", 0.0),
        ("left", {"max_repeats": 3, "early_end_reward": -0.1}, "end_repeated", -0.1),
        ("right", {"action_form": "action", "early_end_reward": -0.1}, "end_bad_format", -0.1),
        ("right" * 9, {"on_long_reply": "end", "early_end_reward": -0.2}, "end_long_reply", -0.2),
    ],
)
async def test_what_ends_an_episode_early_is_named_and_rewarded_as_the_yaml_says(
    reply: str, args: dict[str, Any], end: str, reward: float
) -> None:
    made = await play(Toolbox(lambda _: reply), **args)
    assert {e.metrics[end] for e in made} == {1.0}
    assert {e.reward for e in made} == {reward}
    assert {e.metrics["success"] for e in made} == {0.0}


@pytest.mark.parametrize("policy", ["pass", "no_op", "penalty", "end"])
@pytest.mark.parametrize("step_wise", [False, True])
async def test_long_replies_and_truncation_agree_whatever_becomes_of_a_long_reply(policy: str, step_wise: bool) -> None:
    made = await play(Toolbox(lambda _: "right" * 9), n=1, on_long_reply=policy, step_wise=step_wise, max_turns=2)
    assert {e.truncation for e in made} == {Truncation.RESPONSE}
    assert made[-1].metrics["long_replies"] == made[-1].metrics["end_long_reply"] + (policy != "end") * 2 > 0
    made = await play(Toolbox(right), n=1, on_long_reply=policy, step_wise=step_wise)
    assert ({e.truncation for e in made}, made[-1].metrics["long_replies"]) == ({Truncation.NONE}, 0)


async def test_a_bad_reply_may_cost_a_penalty_or_nothing_and_the_policy_is_told() -> None:
    def policy(seen: list[tuple[str, str]]) -> str:
        replies = [text for role, text in seen if role == "assistant"][:-1]
        return "<action>right</action>" if replies else "what?"

    made = await play(Toolbox(policy), n=1, action_form="action", on_bad_format="penalty", penalty=0.25)
    assert made[0].reward == 0.75
    assert made[0].metrics["bad_format"] == 1
    said = turns(made[0].token_ids.tolist())[3][1]
    assert said == "Nothing happens: there is no <action>...</action> in your reply.\nYou are at 0 of 2."
    assert (await play(Toolbox(policy), n=1, action_form="action", on_bad_format="no_op"))[0].reward == 1.0


async def test_several_bad_replies_in_a_row_are_told_the_environments_last_answer_once() -> None:
    def policy(seen: list[tuple[str, str]]) -> str:
        replies = [text for role, text in seen if role == "assistant"][:-1]
        return "what?" if len(replies) < 3 else "<action>right</action>"

    made = await play(Toolbox(policy), n=1, action_form="action", on_bad_format="no_op")
    told = [text for role, text in turns(made[0].token_ids.tolist()) if role == "user"]
    assert told[1:4] == ["Nothing happens: there is no <action>...</action> in your reply.\nYou are at 0 of 2."] * 3
    assert told[4] == "You are at 1 of 2."


async def test_step_rewards_add_up_to_the_episodes_reward_after_an_early_end() -> None:
    made = await play(Toolbox(lambda _: "left"), n=1, step_wise=True, max_repeats=2, early_end_reward=-0.3)
    assert sum(json.loads(e.info_json)["step_reward"] for e in made) == pytest.approx(-0.3)


async def test_a_long_observation_is_cut_and_says_so() -> None:
    class Talkative(Corridor):
        async def reset(self) -> Answer:
            return Answer("x" * 500)

    tools = Toolbox(right, {"corridor": Talkative})
    made = await play(tools, n=1, max_observation_characters=100)
    assert turns(made[0].token_ids.tolist())[0][1] == "x" * 100 + " [... 400 characters left out]"


async def test_a_first_observation_that_does_not_fit_is_refused_with_the_lengths() -> None:
    with pytest.raises(InvalidInput, match=r"model\.max_model_len: the first observation takes"):
        await play(Toolbox(right, max_model_tokens=50))


class Broken(Corridor):
    """The second episode breaks in its second step."""

    made = 0
    problem: Exception = EnvironmentFailed("gone")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        type(self).made += 1
        self.bad = type(self).made == 2

    async def step(self, action: str) -> Answer:
        if self.bad and self.steps == 1:
            raise self.problem
        await asyncio.sleep(0.01)
        return await super().step(action)


async def test_a_failed_episode_fails_its_whole_group_and_is_never_a_zero_reward() -> None:
    Broken.made = 0
    task = make_episode_task('{"environment": "corridor"}', 4, workflow="environment_workflow")
    tools = Toolbox(right, {"corridor": Broken})
    before = EPISODES.labels("corridor", "failed_crash")._value.get()
    failure = await attempt.explore(task, 1, "me", tools)
    assert isinstance(failure, AttemptFailure)
    assert (failure.cause, failure.final) == (FailureCause.ENVIRONMENT_ERROR, False)
    assert "gone" in failure.error
    assert all(episode.closed for episode in tools.episodes), "the other episodes of the group end with it"
    assert EPISODES.labels("corridor", "failed_crash")._value.get() == before + 1
    again = await attempt.explore(task, 2, "another", Toolbox(right))
    assert isinstance(again, Group)
    assert [e.reward for e in again.experiences] == [1, 1, 1, 1]


async def test_an_episode_that_takes_too_long_is_a_timeout_and_is_closed() -> None:
    class Slow(Corridor):
        async def step(self, action: str) -> Answer:
            await asyncio.sleep(60)
            return await super().step(action)

    tools = Toolbox(right, {"corridor": Slow})
    task = make_episode_task('{"environment": "corridor"}', 2, workflow="environment_workflow", timeout_seconds=0.2)
    failure = await attempt.explore(task, 1, "me", tools)
    assert isinstance(failure, AttemptFailure)
    assert failure.cause is FailureCause.TIMEOUT
    assert all(episode.closed for episode in tools.episodes)


async def test_a_dead_engine_among_other_failures_is_raised_as_itself() -> None:
    Broken.made = 0

    def policy(seen: list[tuple[str, str]]) -> str:
        if seen[-2][1].startswith("You are at 1"):
            raise EngineFailed("core is gone")
        return "right"

    task = make_episode_task('{"environment": "corridor"}', 4, workflow="environment_workflow")
    with pytest.raises(EngineFailed):
        await attempt.explore(task, 1, "me", Toolbox(policy, {"corridor": Broken}))


def test_the_mask_of_an_episode_is_what_the_policy_said() -> None:
    made = asyncio.run(play(Toolbox(right), n=1))
    assert np.count_nonzero(made[0].action_mask) == 2 * len("right!")
