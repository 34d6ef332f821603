"""Countdown: reach the target with + - * /, every given number exactly once. Over several turns a wrong try gets its
mistake as the answer; a single reply can be scored too."""

import random
import re
from dataclasses import dataclass
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.arithmetic import BadExpression, evaluate, find_expression
from trinity.environments.attempts import AttemptsGame
from trinity.environments.game import Unsolvable, replies
from trinity.runtime.errors import InvalidInput
from trinity.sdk.environment import Description
from trinity.sdk.scoring import ScoreItem, ScoreResult

_ANSWER = re.compile(r"<answer>(.{0,400}?)</answer>", re.DOTALL)
_FORMAT_REWARD = 0.1


@dataclass(frozen=True)
class Puzzle:
    numbers: tuple[int, ...]
    target: int

    @classmethod
    def of(cls, task: dict[str, Any]) -> "Puzzle":
        """Reads a row with `nums` (or `numbers`) and `target`. Raises InvalidInput."""
        numbers = task.get("nums", task.get("numbers"))
        target = task.get("target")
        if not isinstance(numbers, list) or not numbers or not all(type(n) is int for n in numbers):
            raise InvalidInput("task.nums", f"is {numbers!r}, must be a list of integers")
        if type(target) is not int:
            raise InvalidInput("task.target", f"is {target!r}, must be an integer")
        return cls(tuple(numbers), target)

    def judge(self, expression: str) -> str:
        """Says why the expression does not solve the puzzle; empty if it does."""
        left, equals, right = expression.partition("=")
        if equals and right.strip() != str(self.target):
            return "the right-hand side is not the target"
        try:
            value, used = evaluate(left.strip())
        except BadExpression as error:
            return f"the expression {error}"
        if sorted(used) != sorted(self.numbers):
            return f"it uses {used}, not each of {list(self.numbers)} exactly once"
        return "" if value == self.target else f"its value is {float(value):g}, not {self.target}"


class Countdown(AttemptsGame):
    """Reach the target with each number once. Reward 1 at the first right try, 0 after `max_attempts` wrong ones.

    A row is {"nums": [...], "target": n}.
    """

    description = Description(
        "countdown", "Reach a target with + - * / and every given number exactly once.", deterministic=True
    )
    isolation = "none"

    def ask(self, task: Arguments, args: Arguments) -> str:
        self.puzzle = Puzzle.of(task.values)
        return (
            f"Using the numbers {list(self.puzzle.numbers)}, make an expression that equals {self.puzzle.target}. "
            "You may use + - * / and parentheses, and must use each number exactly once. "
            "Reply with <think>...</think><answer>expression</answer>."
        )

    def judge(self, answer: str) -> str:
        return self.puzzle.judge(answer)

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        puzzle = Puzzle.of(task)
        found = find_expression(puzzle.numbers, puzzle.target)
        if found is None:
            raise Unsolvable(f"{list(puzzle.numbers)} cannot make {puzzle.target}")
        return replies([found], cls.tag)


def countdown_reward(item: ScoreItem, args: dict[str, Any]) -> ScoreResult:
    """1 if the last <answer> solves the row's puzzle, 0.1 if there is an <answer>, else 0 (the TinyZero rule)."""
    puzzle = Puzzle.of(item.task)
    answers = _ANSWER.findall(item.response[-100_000:])
    if not answers:
        return ScoreResult(0.0, {"accuracy": 0.0, "format_score": 0.0})
    solved = not puzzle.judge(answers[-1].strip())
    return ScoreResult(1.0 if solved else _FORMAT_REWARD, {"accuracy": float(solved), "format_score": _FORMAT_REWARD})


def generate(count: int, seed: int, numbers: int = 4, highest: int = 50, highest_target: int = 200) -> list[dict]:
    """Rows that can be solved, by construction: a random expression is written first, its value is the target."""
    random_numbers = random.Random(f"countdown {seed}")
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        chosen = [random_numbers.randint(1, highest) for _ in range(numbers)]
        value = chosen[0]
        for number in chosen[1:]:
            made = [value + number, value - number, value * number]
            made += [value // number] if value % number == 0 else []
            value = random_numbers.choice([v for v in made if 0 <= v <= 10 * highest_target] or [value + number])
        if 0 < value <= highest_target:
            random_numbers.shuffle(chosen)
            rows.append({"nums": chosen, "target": value})
    return rows
