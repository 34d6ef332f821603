"""Replies that cannot be used follow the YAML's rule and are counted; episodes have limits."""

from typing import Any

import pytest

from support.fakes.environments.playing import play
from trinity.environments import ENVIRONMENTS
from trinity.environments.replies import write
from trinity.environments.scorers import SCORERS
from trinity.environments.sokoban import Sokoban
from trinity.plugins.environments import built_in_environments, built_in_scorers
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

LEVEL = {"level": "######\n#P___#\n#__X_#\n#__O_#\n######"}


def sokoban(*replies: str, **args: Any):  # type: ignore[no-untyped-def]
    return play(Sokoban(), replies, LEVEL, args)


@pytest.mark.parametrize(("kind", "reply"), [("invalid_format", "two\nlines"), ("invalid_action", write("jump"))])
def test_each_policy_does_as_it_says(kind: str, reply: str) -> None:
    ended = sokoban(reply, **{f"on_{kind}": "end", "end_penalty": 0.5})
    assert (ended.last.done, ended.reward, ended.last.info["success"]) == (True, -0.5, False)
    fined = sokoban(reply, write("right"), **{f"on_{kind}": "penalty", "penalty": 0.25})
    assert (fined.last.done, fined.reward) == (False, pytest.approx(-0.35))
    ignored = sokoban(reply, write("right"), **{f"on_{kind}": "noop"})
    assert (ignored.last.done, ignored.reward) == (False, pytest.approx(-0.1))
    for played in (ended, fined, ignored):
        assert played.last.metrics[kind] == 1
        assert played.observations[1].info["problem"]


def test_a_reply_that_cannot_be_used_moves_nothing_but_costs_a_turn() -> None:
    played = sokoban("", write("jump"), "<action>right</action>", on_invalid_format="noop")
    assert "#P___#" in played.observations[2].text
    assert "#_P__#" in played.last.text
    assert played.last.metrics["steps"] == 3
    assert (played.last.metrics["invalid_format"], played.last.metrics["invalid_action"]) == (1, 1)


def test_strict_replies_are_asked_for_by_the_yaml() -> None:
    assert sokoban("<action>right</action>").last.metrics["invalid_format"] == 0
    assert sokoban("<action>right</action>", reply_format="strict").last.metrics["invalid_format"] == 1


def test_an_overlong_turn_is_no_turn() -> None:
    played = sokoban("<think>" + "x" * 500 + "</think><action>right</action>", max_reply_characters=200)
    assert played.last.metrics["invalid_format"] == 1
    assert "at most 200" in played.last.text


def test_the_steps_are_limited_and_failure_may_cost() -> None:
    played = sokoban(*[write("left")] * 10, max_steps=3, rewards="sparse", failure_reward=-0.1)
    assert len(played.observations) == 4
    assert (played.last.done, played.reward, played.won) == (True, -0.1, False)


def test_equal_actions_in_a_row_end_the_episode_when_the_yaml_says_so() -> None:
    left, up = write("left"), write("up")
    assert len(sokoban(left, left, up, left, left, left, left, max_repeats=3).observations) == 7
    assert not sokoban(*[left] * 20).last.done


def test_a_refused_action_is_an_action_between_equal_ones() -> None:
    left, up, jump = write("left"), write("up"), write("jump")
    played = sokoban(left, jump, left, up, max_repeats=2)
    assert not played.last.done
    assert len(played.observations) == 5


def test_equal_refused_actions_in_a_row_end_the_episode_too() -> None:
    jump = write("jump")
    played = sokoban(jump, jump, jump, jump, max_repeats=3, end_penalty=0.5)
    assert (len(played.observations), played.last.done, played.reward) == (4, True, -0.5)
    assert (played.last.metrics["invalid_action"], bool(played.last.info["problem"])) == (3, True)


def test_a_reply_without_an_action_breaks_the_row() -> None:
    left = write("left")
    assert not sokoban(left, "two\nlines", left, max_repeats=2).last.done


def test_the_last_reward_may_be_the_episodes() -> None:
    replies = [write("jump"), write("right"), write("jump")]
    args = {"rewards": "sparse", "on_invalid_action": "penalty", "penalty": 0.25, "rewards_add_up": False}
    played = sokoban(*replies, **args)
    assert [observation.reward for observation in played.observations[1:]] == [-0.25, 0.25, -0.25]
    assert played.reward == played.last.metrics["reward"] == -0.25
    assert sokoban(*replies, **{**args, "rewards_add_up": True}).reward == -0.5


def test_actions_may_differ_in_case() -> None:
    assert sokoban("<action>RIGHT</action>").last.metrics["invalid_action"] == 0


def test_observations_list_the_actions_unless_told_not_to() -> None:
    assert sokoban().last.info["available_actions"] == ["up", "down", "left", "right"]
    assert "Available actions: up, down, left, right" in sokoban().last.text
    bare = sokoban(list_actions=False).last
    assert "Available" not in bare.text
    assert "available_actions" not in bare.info


def test_the_instructions_begin_the_first_observation() -> None:
    first = sokoban(write("right")).observations
    assert first[0].text.startswith(first[0].info["instructions"])
    assert "instructions" not in first[1].info


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"max_step": 3}, "args.max_step: is unknown; did you mean max_steps?"),
        ({"max_steps": 0}, "args.max_steps: is 0, must be an integer >= 1"),
        ({"max_steps": True}, "args.max_steps"),
        ({"on_invalid_action": "die"}, "args.on_invalid_action: is 'die', must be one of end, penalty, noop"),
        ({"reply_format": "xml"}, "args.reply_format"),
        ({"penalty": -1}, "args.penalty"),
        ({"penalty": float("nan")}, "args.penalty"),
        ({"list_actions": "yes"}, "args.list_actions: is 'yes', must be true or false"),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(args: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Sokoban().reset(LEVEL, args, 0)
    assert said in str(refused.value)


@pytest.mark.parametrize("absent", [None, ""])
def test_null_and_empty_text_mean_the_default(absent: Any) -> None:
    assert not sokoban(write("up"), max_steps=absent).last.done


def test_every_environment_has_a_name_of_its_own() -> None:
    assert all(kind.description.name == name for name, kind in ENVIRONMENTS.items())


def test_the_core_finds_every_environment_and_scorer_by_its_entry_point() -> None:
    assert built_in_environments() == ENVIRONMENTS and built_in_scorers() == SCORERS
