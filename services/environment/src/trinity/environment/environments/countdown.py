"""Countdown over several turns: a wrong try is answered with what was wrong."""

import re
from typing import Any

from trinity.environment.countdown_rules import Puzzle
from trinity.environment.environment import Description, Environment, Observation
from trinity.runtime.errors import InvalidInput

_ANSWER = re.compile(r"<answer>(.{0,400}?)</answer>", re.DOTALL)


class Countdown(Environment):
    """Reach the target with each number once. Reward 1 at the first right try, 0 after `max_attempts` wrong ones."""

    description = Description("countdown", "Reach a target with + - * / and every given number exactly once.")

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        self.puzzle = Puzzle.of(task)
        self.max_attempts = args.get("max_attempts", 3)
        if type(self.max_attempts) is not int or self.max_attempts < 1:
            raise InvalidInput("args.max_attempts", f"is {self.max_attempts!r}, must be an integer >= 1")
        self.attempts = 0
        return Observation(
            f"Using the numbers {list(self.puzzle.numbers)}, make an expression that equals {self.puzzle.target}. "
            "You may use + - * / and parentheses, and must use each number exactly once. "
            "Reply with <answer>expression</answer>."
        )

    def step(self, action: str) -> Observation:
        self.attempts += 1
        found = _ANSWER.findall(action[-100_000:])
        problem = self.puzzle.judge(found[-1].strip()) if found else "there is no <answer>...</answer> in the reply"
        metrics = {"attempts": float(self.attempts), "success": float(not problem)}
        if not problem:
            return Observation("Correct.", reward=1.0, done=True, metrics=metrics)
        if self.attempts >= self.max_attempts:
            return Observation(f"Incorrect: {problem}.", done=True, metrics=metrics)
        left = self.max_attempts - self.attempts
        return Observation(f"Incorrect: {problem}. Try again; {left} left.", metrics=metrics)
