"""Nim: who acts, who wins, and what a move was worth."""

from typing import Any

import pytest

from trinity.environments.nim import Nim
from trinity.runtime.errors import InvalidInput
from trinity.sdk.environment import Observation

pytestmark = pytest.mark.core


def played(stones: int, *replies: str, **args: Any) -> list[Observation]:
    game = Nim()
    return [game.reset({"stones": stones}, args, 0), *(game.step(reply) for reply in replies)]


def test_players_act_in_turn_and_the_last_stone_wins() -> None:
    begin, after, over = played(5, "1", "<action>3</action>")[:3]
    assert (begin.player, begin.text.splitlines()[-1], begin.rewards) == ("first", "5 stones", {})
    assert begin.text.startswith(begin.info["instructions"])
    assert (after.player, after.text, after.rewards, after.metrics) == (
        "second", "4 stones", {}, {"unusable": 0.0, "best_moves": 1.0},
    )  # fmt: skip
    assert (over.player, over.done, over.text) == ("first", False, "1 stone")
    end = played(5, "1", "3", "1")[-1]
    assert (end.player, end.done, end.rewards) == ("", True, {"first": 1.0, "second": -1.0})


def test_best_moves_are_those_of_the_player_who_acted() -> None:
    answers = played(9, "2", "3", "1", "3")
    # 9 -> 7 was not the best; 7 -> 4 was; nothing was to win at 4, so the first player's share stays.
    assert [one.metrics.get("best_moves") for one in answers[1:]] == [0.0, 1.0, 0.0, 1.0]
    assert answers[-1].rewards == {"first": -1.0, "second": 1.0}
    assert "best_moves" not in played(4, "1")[-1].metrics


@pytest.mark.parametrize("reply", ["", "0", "4", "-1", "one", "٢", "1.0", "9" * 5000, "1 1"])
def test_a_reply_that_is_no_move_loses_at_once(reply: str) -> None:
    end = played(9, "1", reply)[-1]
    assert (end.done, end.rewards, end.metrics["unusable"]) == (True, {"first": 1.0, "second": -1.0}, 1.0)


def test_no_more_can_be_taken_than_there_are() -> None:
    assert played(2, "3")[-1].rewards["first"] == -1
    assert played(2, "2")[-1].rewards["first"] == 1
    assert played(7, "5", most=6)[-1].text == "2 stones"


@pytest.mark.parametrize(
    ("row", "args", "said"),
    [
        ({"stones": 0}, {}, "task.stones: is 0, must be an integer from 1 to 1000"),
        ({}, {"most": 0}, "args.most: is 0"),
        ({}, {"mots": 2}, "args.mots: is unknown; did you mean most"),
    ],
)
def test_what_cannot_be_played_is_refused(row: dict[str, Any], args: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Nim().reset(row, args, 0)
