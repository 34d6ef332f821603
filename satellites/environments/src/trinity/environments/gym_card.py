"""Gym-Card (Zhai et al. 2024, "Fine-Tuning Large Vision-Language Models as Decision-Making Agents via RL") in text:
NumberLine, EZPoints, Points24, BlackJack."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

from trinity.environments.arguments import Arguments
from trinity.environments.arithmetic import BadExpression, evaluate, find_expression
from trinity.environments.game import FORMAT_HINT, TextGame, Turn, TurnRules, Unsolvable, replies
from trinity.sdk.environment import Description, Environment, Observation

RANKS = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")
NUMBERS = {rank: min(position, 10) for position, rank in enumerate(RANKS, 1)}
RIGHT_REWARD = 10.0
WRONG_REWARD = -1.0
_TOKEN = re.compile(r"\d+|[-+*/()]")


class _Points(TextGame):
    """Each action appends one token to the formula. A number that is not on the cards, or no longer: -1, and a blank
    is appended, which changes nothing but the length. `=` ends the episode: 10 if the formula has the target's value
    and uses every card once, else -1. An action upon more than `longest` tokens ends it with -1. Everything else: 0.

    A row is {"cards": ["A", "10", "K", ...]}, or {"seed"}, or nothing.
    """

    isolation = "none"
    card_count: ClassVar[int]
    target: ClassVar[int]
    symbols: ClassVar[tuple[str, ...]]
    longest: ClassVar[int]

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        self.cards = self.read_cards(task, seed)
        self.numbers = [NUMBERS[card] for card in self.cards]
        self.formula: list[str] = []
        self.goal = f"Write a formula that equals {self.target} and uses each of {self.numbers} exactly once."
        return self._text()

    def actions(self) -> Sequence[str]:
        return (*map(str, range(1, 11)), *self.symbols, "=")

    def play(self, action: str) -> Turn:
        if action == "=":
            success = self._right()
            return Turn(self._text(), RIGHT_REWARD if success else WRONG_REWARD, True, success)
        if len(self.formula) > self.longest:
            return Turn(f"The formula is too long.\n{self._text()}", WRONG_REWARD, True)
        if action.isdigit():
            used = Counter(self.formula)
            if used[action] >= self.numbers.count(int(action)):
                self.formula.append("")
                return Turn(f"There is no {action} left on the cards.\n{self._text()}", WRONG_REWARD)
        self.formula.append(action)
        return Turn(self._text())

    def _right(self) -> bool:
        try:
            value, used = evaluate(" ".join(self.formula).strip())
        except BadExpression:
            return False
        return value == self.target and sorted(used) == sorted(self.numbers)

    def _text(self) -> str:
        cards = ", ".join(self.cards)
        formula = " ".join(filter(None, self.formula)) or "(empty)"
        return f"Cards: {cards}. Numbers: {self.numbers}. Current formula: {formula}"

    @classmethod
    def read_cards(cls, task: Arguments, seed: int) -> list[str]:
        if "cards" in task:
            cards = task.get("cards", None)
            if not isinstance(cards, list) or len(cards) != cls.card_count or not all(c in RANKS for c in cards):
                raise task.wrong("cards", cards, f"a list of {cls.card_count} of {', '.join(RANKS)}")
            return cards
        return cls.draw(task, random.Random(f"{cls.description.name} {task.integer('seed', seed)}"))

    @classmethod
    def draw(cls, task: Arguments, random_numbers: random.Random) -> list[str]:
        """Random cards that can make the target."""
        raise NotImplementedError

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        cards = cls.read_cards(Arguments(task, "task"), seed)
        formula = find_formula(cards, cls.target, cls.symbols)
        if formula is None:
            raise Unsolvable(f"no formula of {cards} equals {cls.target}")
        return replies([*formula, "="])


class EZPoints(_Points):
    """Two cards whose sum or product is 12; A is 1, J Q K are 10."""

    description = Description("ez_points", "Make 12 from two cards with + or *.", deterministic=True)
    defaults = TurnRules(max_steps=10)
    card_count, target, symbols, longest = 2, 12, ("+", "*"), 5
    instructions = (
        "Write a formula that equals 12 and uses each card's number once: A is 1, J, Q and K are 10. Each action "
        f"appends one token: a number, + or *; = finishes. {FORMAT_HINT}"
    )

    @classmethod
    def draw(cls, task: Arguments, random_numbers: random.Random) -> list[str]:
        pairs = product(RANKS, RANKS)
        fit = [(a, b) for a, b in pairs if cls.target in (NUMBERS[a] + NUMBERS[b], NUMBERS[a] * NUMBERS[b])]
        return list(random_numbers.choice(fit))


class Points24(_Points):
    """Four cards and + - * / ( ). `solvable: false` in the row draws any cards, also such that cannot make 24."""

    description = Description("points24", "Make 24 from four cards with + - * / and parentheses.", deterministic=True)
    defaults = TurnRules(max_steps=25)
    card_count, target, symbols, longest = 4, 24, ("+", "-", "*", "/", "(", ")"), 20
    instructions = (
        "Write a formula that equals 24 and uses each card's number once: A is 1, J, Q and K are 10. Each action "
        f"appends one token: a number, + - * / ( or ); = finishes. {FORMAT_HINT}"
    )

    @classmethod
    def draw(cls, task: Arguments, random_numbers: random.Random) -> list[str]:
        solvable = task.boolean("solvable", True)
        while True:
            cards = random_numbers.choices(RANKS, k=4)
            if not solvable or find_formula(cards, cls.target, cls.symbols):
                return cards


def find_formula(cards: Sequence[str], target: int, symbols: Sequence[str]) -> list[str] | None:
    """The tokens of a formula with the target's value and every card once; None if there is none."""
    found = find_expression([NUMBERS[card] for card in cards], target, "".join(symbols))
    return _TOKEN.findall(found) if found is not None else None


class NumberLine(TextGame):
    """Numbers from 0 to `max_position` (5). Reward 1 at the target, -1 for a move that comes no nearer, else 0.

    `max_steps` is twice `max_position` unless it is given.

    A row is {"start", "target"}, or {"seed"}, or nothing: then the episode's seed draws both.
    """

    description = Description("number_line", "Walk to the target number by ones.", deterministic=True)
    isolation = "none"
    instructions = f"Make the current number equal to the target number. Actions: - and + (by one). {FORMAT_HINT}"

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        self.highest = args.integer("max_position", 5, low=1, high=1000)
        if "max_steps" not in args:
            self.rules = replace(self.rules, max_steps=2 * self.highest)
        self.current, self.target = read_line(task, self.highest, seed)
        self.goal = f"Make the current number equal to {self.target}."
        return self._text()

    def actions(self) -> Sequence[str]:
        return ("-", "+")

    def play(self, action: str) -> Turn:
        before = abs(self.target - self.current)
        self.current = min(max(self.current + (1 if action == "+" else -1), 0), self.highest)
        distance = abs(self.target - self.current)
        success = distance == 0
        return Turn(self._text(), 1.0 if success else -1.0 if distance >= before else 0.0, success, success)

    def _text(self) -> str:
        return f"Target number: {self.target}. Current number: {self.current}"

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        start, target = read_line(Arguments(task, "task"), args.get("max_position", 5), seed)
        return replies(["+" if target > start else "-"] * abs(target - start))


def read_line(task: Arguments, highest: int, seed: int) -> tuple[int, int]:
    """Start and target, which differ."""
    random_numbers = random.Random(f"number line {task.integer('seed', seed)}")
    start, target = random_numbers.sample(range(highest + 1), 2)
    start = task.integer("start", start, low=0, high=highest)
    target = task.integer("target", target, low=0, high=highest)
    if start == target:
        raise task.wrong("target", target, "another number than the start")
    return start, target


DEALER_STANDS_AT = 17


def total(cards: Sequence[str]) -> int:
    """Value of a hand: an ace is 11 unless that is too much."""
    value = sum(NUMBERS[card] for card in cards)
    return value + 10 if "A" in cards and value + 10 <= 21 else value


class BlackJack(TextGame):
    """An infinite deck; the dealer draws to 17. Reward 1 won, 0 drawn, -1 lost; success is winning.

    A row is {"seed"}, or nothing: then the episode's seed shuffles. The same seed deals the same cards.
    """

    description = Description("blackjack", "Play a hand of BlackJack against the dealer.", deterministic=True)
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


GAMES: dict[str, type[TextGame]] = {kind.description.name: kind for kind in (NumberLine, EZPoints, Points24, BlackJack)}


class GymCard(Environment):
    """The game that the row's `game` names, else the argument `game`; all else is that game's."""

    description = Description(
        "gym_card", "NumberLine, EZPoints, Points24 or BlackJack, as the row's `game` says.", deterministic=True
    )
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
