"""NumberLine, EZPoints, Points24 and BlackJack by their rules."""

import random

import pytest

from support.fakes.environments.playing import play
from trinity.environments.arguments import Arguments
from trinity.environments.game import Unsolvable
from trinity.environments.gym_card import RANKS, BlackJack, EZPoints, GymCard, NumberLine, Points24, find_formula, total
from trinity.environments.replies import write
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core


def rewards(environment, actions, task, **args):  # type: ignore[no-untyped-def]
    played = play(environment, map(write, actions), task, args)
    return [o.reward for o in played.observations[1:]], played


def test_number_line_pays_for_arriving_and_takes_for_walking_away() -> None:
    found, played = rewards(NumberLine(), ["-", "+", "+", "+"], {"start": 1, "target": 3})
    assert found == [-1, 0, 0, 1]
    assert played.won
    found, _ = rewards(NumberLine(), ["+", "-"], {"start": 5, "target": 4})
    assert found == [-1, 1]  # at the end of the line, a step outwards stays


def test_number_line_ends_after_ten_steps() -> None:
    found, played = rewards(NumberLine(), ["+", "-"] * 10, {"start": 0, "target": 5})
    assert len(found) == 10
    assert not played.won


def test_a_longer_number_line_has_more_steps() -> None:
    found, _ = rewards(NumberLine(), ["-"] * 99, {"start": 0, "target": 20}, max_position=20)
    assert len(found) == 40
    found, _ = rewards(NumberLine(), ["-"] * 99, {"start": 0, "target": 20}, max_position=20, max_steps=7)
    assert len(found) == 7
    task, args = {"start": 0, "target": 20}, {"max_position": 20}
    assert play(NumberLine(), NumberLine.oracle(task, args, 0), task, args).won


def test_ez_points_counts_each_card_once() -> None:
    found, played = rewards(EZPoints(), ["2", "3", "2", "+", "K", "10", "="], {"cards": ["2", "K"]})
    assert found == [0, -1, -1, 0, 0, 0, 10]  # 3 is not there, the 2 is gone, K is no token, 10 is
    assert played.last.metrics["invalid_action"] == 1
    assert played.won


@pytest.mark.parametrize("actions", [["="], ["2", "="], ["2", "*", "10", "="], ["2", "10", "="], ["+", "="]])
def test_ez_points_takes_one_for_a_wrong_formula(actions: list[str]) -> None:
    found, played = rewards(EZPoints(), actions, {"cards": ["2", "K"]})
    assert found[-1] == -1
    assert played.last.done
    assert not played.won


def test_ez_points_ends_a_formula_that_grows_too_long() -> None:
    found, played = rewards(EZPoints(), ["+"] * 9, {"cards": ["2", "K"]})
    assert found == [0] * 6 + [-1]
    assert played.last.done


def test_points24_knows_all_operators_and_parentheses() -> None:
    actions = ["8", "/", "(", "3", "-", "8", "/", "3", ")", "="]
    assert rewards(Points24(), actions, {"cards": ["8", "8", "3", "3"]})[0] == [0] * 9 + [10]
    assert rewards(Points24(), ["8", "/", "(", "8", "-", "8", ")", "="], {"cards": ["8", "8", "8", "3"]})[0][-1] == -1


def test_points24_draws_cards_that_make_24_unless_told_otherwise() -> None:
    def drawn(**row: object) -> list[list[str]]:
        return [Points24.read_cards(Arguments({"seed": seed, **row}, "task"), 0) for seed in range(40)]

    assert all(find_formula(cards, 24, Points24.symbols) for cards in drawn())
    assert not all(find_formula(cards, 24, Points24.symbols) for cards in drawn(solvable=False))
    with pytest.raises(Unsolvable):
        Points24.oracle({"cards": ["A", "A", "A", "A"]}, {}, 0)


def test_an_ace_is_eleven_unless_that_is_too_much() -> None:
    assert total(["A", "K"]) == 21
    assert total(["A", "A"]) == 12
    assert total(["A", "9", "5"]) == 15
    assert total(["A", "A", "K", "9"]) == 21


def test_blackjack_ends_by_its_rules_for_every_deal() -> None:
    outcomes = set()
    for seed in range(300):
        for hits in range(4):
            played = play(BlackJack(), map(write, ["hit"] * hits + ["stand"]), {"seed": seed})
            reward = played.reward
            outcomes.add(reward)
            mine = total(BlackJackState.of(played.last.text).player)
            if mine > 21:
                assert reward == -1
                break
            dealer = total(BlackJackState.of(played.last.text).dealer)
            assert dealer >= 17
            assert reward == (1 if dealer > 21 or mine > dealer else 0 if mine == dealer else -1)
            assert played.won == (reward == 1)
    assert outcomes == {1.0, 0.0, -1.0}


class BlackJackState:
    """The cards that an observation names."""

    def __init__(self, player: list[str], dealer: list[str]) -> None:
        self.player, self.dealer = player, dealer

    @classmethod
    def of(cls, text: str) -> "BlackJackState":
        player = text.split("Player's cards: ")[1].split(".")[0].split(", ")
        dealer = text.split("The dealer has ")[1].split(".")[0].split(", ") if "The dealer has" in text else []
        return cls(player, dealer)


def test_the_same_seed_deals_the_same_cards_beside_other_games() -> None:
    first = play(BlackJack(), [write("hit")], {"seed": 5}).last.text
    random.seed(1)
    random.random()
    play(BlackJack(), [write("hit")], {"seed": 6})
    assert play(BlackJack(), [write("hit")], {"seed": 5}, seed=77).last.text == first


def test_the_deck_is_fair() -> None:
    cards = [
        card for seed in range(2000) for card in BlackJackState.of(play(BlackJack(), [], seed=seed).last.text).player
    ]
    assert all(220 < cards.count(rank) < 400 for rank in RANKS)


def test_gym_card_plays_the_game_of_the_row_else_of_the_yaml() -> None:
    assert "Target number" in play(GymCard(), [], {"game": "number_line"}).last.text
    assert "Dealer's card" in play(GymCard(), [], {}, {"game": "blackjack"}).last.text
    assert "Make 24" not in play(GymCard(), [], {"game": "ez_points"}, {"game": "points24"}).last.text
    with pytest.raises(InvalidInput, match="must be one of number_line"):
        GymCard().reset({}, {}, 0)
    with pytest.raises(InvalidInput, match=r"task.game: is 'poker'"):
        GymCard().reset({"game": "poker"}, {}, 0)


@pytest.mark.parametrize(
    ("environment", "task", "field"),
    [
        (NumberLine, {"start": 2, "target": 2}, "task.target"),
        (NumberLine, {"start": 9}, "task.start"),
        (EZPoints, {"cards": ["2"]}, "task.cards"),
        (EZPoints, {"cards": ["2", "11"]}, "task.cards"),
        (Points24, {"cards": "2345"}, "task.cards"),
        (BlackJack, {"seed": "x"}, "task.seed"),
    ],
)
def test_a_bad_row_is_refused_with_its_field(environment, task, field) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput) as refused:
        environment().reset(task, {}, 0)
    assert refused.value.field == field
