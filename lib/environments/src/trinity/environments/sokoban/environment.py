"""Sokoban as a text game."""

from collections.abc import Sequence
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.environment import Description
from trinity.environments.game import FORMAT_HINT, TextGame, Turn, TurnRules, replies
from trinity.environments.sokoban.generate import generate
from trinity.environments.sokoban.level import MAX_SIDE, MOVES, Level
from trinity.environments.sokoban.solve import solve

STEP_REWARD = -0.1
BOX_REWARD = 1.0
SOLVED_REWARD = 10.0


class Sokoban(TextGame):
    """Push every box onto a target.

    A row is {"size", "boxes", "walls", "seed"} (all optional; the episode's seed stands in for a missing one) or
    {"level": text}. `rewards: dense` (default): -0.1 for a step, +1 for a box that comes onto a target, -1 for one
    that leaves it, +10 for the last; `sparse`: 1 at the end and nothing before.
    """

    description = Description("sokoban", "Push every box onto a target.")
    isolation = "none"
    defaults = TurnRules(max_steps=100)
    instructions = (
        "You are solving Sokoban: push all boxes onto the targets by walking against them. You cannot pull a box, "
        "nor push two at a time, nor walk through walls.\n"
        "Symbols: # wall, _ floor, O target, X box, √ box on a target, P you, S you on a target.\n"
        f"Actions: up, down, left, right. {FORMAT_HINT}"
    )
    goal = "Push all boxes onto the targets."

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        self.sparse = args.choice("rewards", "dense", ["dense", "sparse"]) == "sparse"
        self.level = read_level(task, seed)
        return self.level.text()

    def actions(self) -> Sequence[str]:
        return tuple(MOVES)

    def play(self, action: str) -> Turn:
        before, self.level = self.level, self.level.move(action)
        solved = self.level.solved
        reward = float(solved)
        if not self.sparse:
            gained = self.level.boxes_on_targets - before.boxes_on_targets
            reward = STEP_REWARD + BOX_REWARD * gained + SOLVED_REWARD * solved
        moved = "" if self.level is not before else "Nothing moves.\n"
        metrics = {"boxes_on_targets": float(self.level.boxes_on_targets)}
        return Turn(moved + self.level.text(), reward, solved, solved, metrics)

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        return replies(solve(read_level(Arguments(task, "task"), seed)))


def read_level(task: Arguments, seed: int) -> Level:
    """The level a row describes. Raises InvalidInput."""
    if "level" in task:
        return Level.parse(task.text("level"))
    size = task.integer("size", 6, low=4, high=MAX_SIDE)
    rows = task.integer("rows", size, low=4, high=MAX_SIDE)
    columns = task.integer("columns", size, low=4, high=MAX_SIDE)
    boxes = task.integer("boxes", 1, low=1, high=6)
    walls = task.number("walls", 0.1, low=0, high=0.5)
    return generate(rows, columns, boxes, walls, task.integer("seed", seed))
