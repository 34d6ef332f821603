"""EZPoints and Points24: write a formula, token by token, that uses every card and has the value asked for."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any, ClassVar

from trinity.environments.arguments import Arguments
from trinity.environments.arithmetic import BadExpression, evaluate, find_expression
from trinity.environments.environment import Description
from trinity.environments.game import FORMAT_HINT, TextGame, Turn, TurnRules, Unsolvable, replies

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

    description = Description("ez_points", "Make 12 from two cards with + or *.")
    defaults = TurnRules(max_steps=10)
    card_count, target, symbols, longest = 2, 12, ("+", "*"), 5
    instructions = (
        "Write a formula that equals 12 and uses each card's number once: A is 1, J, Q and K are 10. Each action "
        f"appends one token: a number, + or *; = finishes. {FORMAT_HINT}"
    )

    @classmethod
    def draw(cls, task: Arguments, random_numbers: random.Random) -> list[str]:
        pairs = [pair for pair in product(RANKS, RANKS) if _makes_twelve(*pair)]
        return list(random_numbers.choice(pairs))


class Points24(_Points):
    """Four cards and + - * / ( ). `solvable: false` in the row draws any cards, also such that cannot make 24."""

    description = Description("points24", "Make 24 from four cards with + - * / and parentheses.")
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


def _makes_twelve(first: str, second: str) -> bool:
    return 12 in (NUMBERS[first] + NUMBERS[second], NUMBERS[first] * NUMBERS[second])


def find_formula(cards: Sequence[str], target: int, symbols: Sequence[str]) -> list[str] | None:
    """The tokens of a formula with the target's value and every card once; None if there is none."""
    found = find_expression([NUMBERS[card] for card in cards], target, "".join(symbols))
    return _TOKEN.findall(found) if found is not None else None
