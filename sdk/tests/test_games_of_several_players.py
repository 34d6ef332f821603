"""The contract of games of several players: what an answer may say of players and their rewards."""

from dataclasses import replace
from typing import Any

import pytest

from trinity.sdk import wire
from trinity.sdk.contract import Answer, Totals, answer_problem, description_problem
from trinity.sdk.environment import Description, Observation

pytestmark = pytest.mark.core

DUEL = Description("duel", players=("white", "black"))
ALONE = Description("alone")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"rewards": {"black": -1.0}}, ""),
        ({"player": "", "done": True, "rewards": {"white": 1.0, "black": -1.0}}, ""),
        ({"player": "red"}, "its player is 'red', must be one of white, black"),
        ({"player": ""}, "its player is '', must be one of white, black"),
        ({"done": True}, "its player is 'white', must be empty once done"),
        ({"reward": 1.0}, r"its reward is 1, of no player; give rewards by player (white, black)"),
        ({"rewards": {"red": 1.0}}, "its rewards have 'red', which is no player; announced: white, black"),
        ({"rewards": {"white": float("nan")}}, "the reward of white is nan; rewards are finite"),
        ({"rewards": {"white": 1.0}, "turn": 0}, "it has rewards after reset"),
    ],
)
def test_an_answer_names_announced_players_alone(changes: dict[str, Any], said: str) -> None:
    answer = replace(Answer("go", turn=1, player="white"), **changes)
    found = answer_problem(answer, answer.turn, DUEL)
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize("changes", [{"player": "white"}, {"rewards": {"white": 1.0}}])
def test_players_that_were_not_announced_are_refused(changes: dict[str, Any]) -> None:
    assert "announces none (players)" in answer_problem(Answer("go", **changes), 0, ALONE)


def test_rewards_of_each_player_keep_the_bound() -> None:
    totals = Totals(2.0)
    for turn in (1, 2):
        assert not totals.problem(Answer(turn=turn, rewards={"white": 1.0, "black": -1.0}))
    assert "the sum of the rewards of black is -3" in totals.problem(Answer(turn=3, rewards={"black": -1.0}))
    assert "the reward of white is 2.5" in Totals(2.0).problem(Answer(turn=1, rewards={"white": 2.5}))


@pytest.mark.parametrize(
    ("players", "said"),
    [
        (("white", "black"), ""),
        (("white",), "must be 2 to 8 different names"),
        (("white", "white"), "must be 2 to 8 different names"),
        (tuple("abcdefghi"), "must be 2 to 8 different names"),
        (("white", "b\n"), "players: has 'b\\n'"),
        (("white", "b" * 65), "1 to 64 printable characters"),
    ],
)
def test_an_announcement_has_two_to_eight_players(players: tuple[str, ...], said: str) -> None:
    found = description_problem(Description("duel", players=players))
    assert said in found
    assert bool(found) == bool(said)


def test_players_and_rewards_survive_the_wire() -> None:
    assert wire.description_of(wire.described(replace(DUEL, reset_timeout_seconds=10.0))).players == DUEL.players
    answer = wire.answer(Observation("go", player="white", rewards={"black": 1}), 1)
    assert wire.answer_from_proto(wire.answer_to_proto(answer)) == answer
    assert (answer.player, answer.rewards) == ("white", {"black": 1.0})
