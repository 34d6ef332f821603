"""The rules of countdown: reach the target with + - * /, every given number exactly once."""

from dataclasses import dataclass
from typing import Any

from trinity.environments.arithmetic import BadExpression, evaluate
from trinity.runtime.errors import InvalidInput


@dataclass(frozen=True)
class Puzzle:
    numbers: tuple[int, ...]
    target: int

    @classmethod
    def of(cls, task: dict[str, Any]) -> "Puzzle":
        """From a row with `nums` (or `numbers`) and `target`. Raises InvalidInput."""
        numbers = task.get("nums", task.get("numbers"))
        target = task.get("target")
        if not isinstance(numbers, list) or not numbers or not all(type(n) is int for n in numbers):
            raise InvalidInput("task.nums", f"is {numbers!r}, must be a list of integers")
        if type(target) is not int:
            raise InvalidInput("task.target", f"is {target!r}, must be an integer")
        return cls(tuple(numbers), target)

    def judge(self, expression: str) -> str:
        """Empty if the expression solves the puzzle, else what is wrong with it."""
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
