"""Countdown over several turns: a wrong try is answered with what was wrong."""

import random
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.arithmetic import find_expression
from trinity.environments.attempts import AttemptsGame
from trinity.environments.countdown_rules import Puzzle
from trinity.environments.game import Unsolvable, replies
from trinity.sdk.environment import Description


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
