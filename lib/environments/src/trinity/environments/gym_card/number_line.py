"""NumberLine: walk to the target by ones."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.environment import Description
from trinity.environments.game import FORMAT_HINT, TextGame, Turn, replies


class NumberLine(TextGame):
    """Numbers from 0 to `max_position` (5). Reward 1 at the target, -1 for a move that comes no nearer, else 0.

    `max_steps` is twice `max_position` unless it is given.

    A row is {"start", "target"}, or {"seed"}, or nothing: then the episode's seed draws both.
    """

    description = Description("number_line", "Walk to the target number by ones.")
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
