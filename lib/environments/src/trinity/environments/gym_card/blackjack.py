"""BlackJack: come nearer to 21 than the dealer without going over it."""

import random
from collections.abc import Sequence
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.environment import Description
from trinity.environments.game import FORMAT_HINT, TextGame, Turn, TurnRules, Unsolvable, replies
from trinity.environments.gym_card.points import NUMBERS, RANKS

DEALER_STANDS_AT = 17


def total(cards: Sequence[str]) -> int:
    """Value of a hand: an ace is 11 unless that is too much."""
    value = sum(NUMBERS[card] for card in cards)
    return value + 10 if "A" in cards and value + 10 <= 21 else value


class BlackJack(TextGame):
    """An infinite deck; the dealer draws to 17. Reward 1 won, 0 drawn, -1 lost; success is winning.

    A row is {"seed"}, or nothing: then the episode's seed shuffles. The same seed deals the same cards.
    """

    description = Description("blackjack", "Play a hand of BlackJack against the dealer.")
    isolation = "none"
    defaults = TurnRules(max_steps=25)
    instructions = (
        "You play BlackJack: the sum of your cards should be as near to 21 as possible without going over it. An ace "
        f"counts 1 or 11; J, Q and K count 10; the dealer draws until 17. Actions: stand, hit. {FORMAT_HINT}"
    )
    goal = "Beat the dealer without going over 21."

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        self.deck = random.Random(f"blackjack {task.integer('seed', seed)}")
        self.dealer = [self._card(), self._card()]
        self.cards = [self._card(), self._card()]
        return self._text()

    def actions(self) -> Sequence[str]:
        return ("stand", "hit")

    def play(self, action: str) -> Turn:
        if action == "hit":
            self.cards.append(self._card())
            if total(self.cards) > 21:
                return Turn(f"{self._text()} You went over 21 and lose.", -1.0, True)
            return Turn(self._text())
        while total(self.dealer) < DEALER_STANDS_AT:
            self.dealer.append(self._card())
        mine, dealers = total(self.cards), total(self.dealer)
        reward = 1.0 if dealers > 21 or mine > dealers else 0.0 if mine == dealers else -1.0
        verdict = {1.0: "You win.", 0.0: "It is a draw.", -1.0: "You lose."}[reward]
        text = f"{self._text()} The dealer has {', '.join(self.dealer)}. {verdict}"
        return Turn(text, reward, True, reward > 0)

    def _card(self) -> str:
        return self.deck.choice(RANKS)

    def _text(self) -> str:
        return f"Dealer's card: {self.dealer[0]}. Player's cards: {', '.join(self.cards)}."

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        """Knows the deck: tries every number of hits. Unsolvable where the deal cannot be won."""
        for hits in range(20):
            game = cls()
            game.reset(task, args, seed)
            actions = ["hit"] * hits + ["stand"]
            for action in actions:
                turn = game.play(action)
                if turn.done:
                    break
            if turn.success:
                return replies(actions)
            if turn.done and action == "hit":
                break
        raise Unsolvable("this deal cannot be won")
