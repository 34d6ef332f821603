"""All four games under one name: a taskset may mix them."""

from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.environment import Description, Environment, Observation
from trinity.environments.game import TextGame
from trinity.environments.gym_card.blackjack import BlackJack
from trinity.environments.gym_card.number_line import NumberLine
from trinity.environments.gym_card.points import EZPoints, Points24

GAMES: dict[str, type[TextGame]] = {kind.description.name: kind for kind in (NumberLine, EZPoints, Points24, BlackJack)}


class GymCard(Environment):
    """The game that the row's `game` names, else the argument `game`; all else is that game's."""

    description = Description("gym_card", "NumberLine, EZPoints, Points24 or BlackJack, as the row's `game` says.")
    isolation = "none"

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        self.game = _game(task, args)()
        return self.game.reset(task, _without_game(args), seed)

    def step(self, action: str) -> Observation:
        return self.game.step(action)

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        return _game(task, args).oracle(task, _without_game(args), seed)


def _game(task: dict[str, Any], args: dict[str, Any]) -> type[TextGame]:
    where = Arguments(task, "task") if task.get("game") is not None else Arguments(args)
    return GAMES[where.choice("game", "", tuple(GAMES))]


def _without_game(args: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in args.items() if name != "game"}
