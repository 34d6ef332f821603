"""ALFWorld as an environment, on small games made on the spot or on its own under $ALFWORLD_DATA."""

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from trinity.environments.alfworld.engine import Engine
from trinity.environments.alfworld.rooms import TASK_TYPES, draw_room
from trinity.environments.arguments import Arguments
from trinity.environments.extras import needs
from trinity.environments.game import FORMAT_HINT, TextGame, Turn, TurnRules, Unsolvable, replies
from trinity.runtime.errors import InvalidInput
from trinity.sdk.environment import Description

DATA_VARIABLE = "ALFWORLD_DATA"
_DOWNLOADED = "~/.cache/alfworld"  # by alfworld-download, without the variable


def game_path(name: str) -> Path:
    """The game file of a row. Raises InvalidInput unless it lies under $ALFWORLD_DATA: the engine evaluates code that
    is in game files, so that a row must not choose any file it likes.
    """
    folder = os.environ.get(DATA_VARIABLE) or os.path.expanduser(_DOWNLOADED)
    if not os.path.isdir(folder):
        raise InvalidInput("task.game_file", f"cannot be read: set {DATA_VARIABLE} to the folder of ALFWorld's games")
    root = Path(folder).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root) or path.suffix != ".tw-pddl":
        raise InvalidInput("task.game_file", f"is {name!r}, must be a .tw-pddl file under {DATA_VARIABLE}={root}")
    if not path.is_file():
        raise InvalidInput("task.game_file", f"is {name!r}, which is not there under {DATA_VARIABLE}={root}")
    return path


_TASK_MARK = "Your task is to: "


@needs("alfworld", "alfworld", "alfworld")
class AlfWorld(TextGame):
    """Reward 1 when the task is done, else 0.

    A row is {"game_file": path} under $ALFWORLD_DATA, or {"task_type", "seed"} for a small game made on the spot (both
    optional; the episode's seed stands in).
    """

    description = Description(
        "alfworld",
        "Do a household task in text.",
        step_timeout_seconds=60,
        reset_timeout_seconds=120,
        deterministic=True,
    )
    # Not thread safe. Episodes mostly wait for the policy, so that several fit in one process.
    isolation = "process"
    episodes_per_process = 8
    memory_limit_mib = 2048
    defaults = TurnRules(max_steps=25, max_repeats=3)
    instructions = (
        "You are in a room and have a household task. You carry at most one thing at a time.\n"
        "Commands: look, inventory, go to X, open X, close X, take THING from X, move THING to X, examine X, "
        "use THING, heat THING with X, cool THING with X, clean THING with X, slice THING with THING. Use the exact "
        f"names of the observations. {FORMAT_HINT}"
    )

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        self.engine = self.held.enter_context(closing(_load(task, seed)))
        text, self._commands = self.engine.reset()
        self.goal = text.partition(_TASK_MARK)[2].strip()
        return text.strip()

    def actions(self) -> Sequence[str]:
        return self._commands

    def play(self, action: str) -> Turn:
        text, self._commands, won = self.engine.step(action)
        return Turn(text.strip(), float(won), won, won)

    def refused_text(self, problem: str) -> str:
        return f"Nothing happens: {problem}."

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        """The plan of ALFWorld's planner."""
        with closing(_load(Arguments(task, "task"), seed, plan=True)) as engine:
            engine.reset()
            plan = engine.plan()
        if not plan:
            raise Unsolvable("the planner finds no way")
        return replies(plan)


def _load(task: Arguments, seed: int, plan: bool = False) -> Engine:
    if "game_file" in task:
        return Engine(game_path(task.text("game_file")), plan)
    game_seed = task.integer("seed", seed)
    kind = task.choice("task_type", TASK_TYPES[game_seed % len(TASK_TYPES)], TASK_TYPES)
    return Engine(draw_room(kind, game_seed), plan)
