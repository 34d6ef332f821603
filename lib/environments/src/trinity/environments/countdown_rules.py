"""The rules of countdown: reach the target with + - * /, every given number exactly once; the score of one reply."""

import re
from dataclasses import dataclass
from typing import Any

from trinity.environments.arithmetic import BadExpression, evaluate
from trinity.runtime.errors import InvalidInput
from trinity.sdk.scoring import ScoreItem, ScoreResult

_ANSWER = re.compile(r"<answer>(.{0,400}?)</answer>", re.DOTALL)
_FORMAT_REWARD = 0.1


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


def countdown_reward(item: ScoreItem, args: dict[str, Any]) -> ScoreResult:
    """1 if the last <answer> solves the row's puzzle, 0.1 if there is an <answer>, else 0 (the TinyZero rule)."""
    puzzle = Puzzle.of(item.task)
    answers = _ANSWER.findall(item.response[-100_000:])
    if not answers:
        return ScoreResult(0.0, {"accuracy": 0.0, "format_score": 0.0})
    solved = not puzzle.judge(answers[-1].strip())
    return ScoreResult(1.0 if solved else _FORMAT_REWARD, {"accuracy": float(solved), "format_score": _FORMAT_REWARD})
