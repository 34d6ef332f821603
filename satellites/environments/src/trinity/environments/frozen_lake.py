"""FrozenLake: from the start to the goal over the ice, around the holes."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.game import TextGame, Turn, TurnRules, Unsolvable, replies
from trinity.environments.replies import Reply
from trinity.sdk.environment import Description

Cell = tuple[int, int]  # row, column
# In the order of their numbers, from 1: a reply may name an action by its number.
MOVES: dict[str, Cell] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
_TRIES = 1000


class FrozenLake(TextGame):
    """Reward 1 at the goal, else 0.

    A row is {"size", "p", "seed"} (all optional; the episode's seed stands in for a missing one), `p` being the share
    of ice, or {"desc": ["SFFF", "FHFH", ...]}. Start and goal are random; the map is drawn until a path of at most
    `path_max_steps` moves exists. `is_slippery`: a move goes to either side with probability 1/3 each.
    """

    description = Description(
        "frozen_lake", "Cross the ice to the goal without falling into a hole.", deterministic=True
    )
    isolation = "none"
    defaults = TurnRules(max_steps=10)
    instructions = (
        "You walk on a frozen lake and want to reach the goal without falling into a hole.\n"
        "Symbols: P you, _ ice, O hole, G goal, X you in a hole, √ you at the goal.\n"
        "Actions: Left, Down, Right, Up (or 1, 2, 3, 4 in this order). Think, then reply with one action in triple "
        "backticks, such as ```Right```, or in tags, such as <action>Right</action>."
    )
    goal = "Reach the goal G."

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        self.slippery = args.boolean("is_slippery", False)
        self.holes, self.size, self.player, self.target = read_map(task, args, seed)
        self.random_numbers = random.Random(f"frozen lake {task.integer('seed', seed)} {seed}")
        return self._text()

    def actions(self) -> Sequence[str]:
        return tuple(MOVES)

    def read(self, reply: str) -> Reply:
        found = super().read(reply)
        if found.action in ("1", "2", "3", "4"):
            return replace(found, action=tuple(MOVES)[int(found.action) - 1])
        return found

    def play(self, action: str) -> Turn:
        if self.slippery:
            moves = tuple(MOVES)
            action = moves[(moves.index(action) + self.random_numbers.choice((-1, 0, 1))) % 4]
        self.player = _moved(self.player, action, self.size)
        success = self.player == self.target
        return Turn(self._text(), float(success), success or self.player in self.holes, success)

    def _text(self) -> str:
        rows = ([self._symbol((r, c)) for c in range(self.size[1])] for r in range(self.size[0]))
        return "\n".join("\t".join(row) for row in rows)

    def _symbol(self, cell: Cell) -> str:
        if cell == self.player:
            return "√" if cell == self.target else "X" if cell in self.holes else "P"
        return "G" if cell == self.target else "O" if cell in self.holes else "_"

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        """The shortest path; Unsolvable on slippery ice, where no path is certain."""
        if args.get("is_slippery"):
            raise Unsolvable("no path is certain on slippery ice")
        holes, size, start, target = read_map(Arguments(task, "task"), Arguments(args), seed)
        path = shortest_path(holes, size, start, target)
        if path is None:
            raise Unsolvable("no path leads to the goal")
        return replies(path)


def read_map(task: Arguments, args: Arguments, seed: int) -> tuple[frozenset[Cell], Cell, Cell, Cell]:
    """Holes, size (rows, columns), start and goal of a row. Raises InvalidInput."""
    longest = args.integer("path_max_steps", 8, low=1)
    if "desc" in task:
        return _described(task)
    size = task.integer("size", 4, low=2, high=12)
    ice = task.number("p", 0.8, low=0, high=1)
    random_numbers = random.Random(f"frozen lake {size} {ice} {task.integer('seed', seed)}")
    cells = [(r, c) for r in range(size) for c in range(size)]
    for _ in range(_TRIES):
        start, target = random_numbers.sample(cells, 2)
        holes = frozenset(c for c in cells if c not in (start, target) and random_numbers.random() >= ice)
        path = shortest_path(holes, (size, size), start, target)
        if path is not None and len(path) <= longest:
            return holes, (size, size), start, target
    raise task.wrong("p", ice, f"larger: no map with a path of at most {longest} moves was found")


def _described(task: Arguments) -> tuple[frozenset[Cell], Cell, Cell, Cell]:
    rows = task.get("desc", None)
    good = isinstance(rows, list) and bool(rows) and all(isinstance(r, str) and len(r) == len(rows[0]) for r in rows)
    if not good or set("".join(rows)) - set("SFHG") or "".join(rows).count("S") != 1 or "".join(rows).count("G") != 1:
        raise task.wrong("desc", rows, "a list of rows of equal length, of F and H with one S and one G")
    cells = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    where = {symbol: cell for cell, symbol in cells.items()}
    holes = frozenset(cell for cell, symbol in cells.items() if symbol == "H")
    return holes, (len(rows), len(rows[0])), where["S"], where["G"]


def shortest_path(holes: frozenset[Cell], size: Cell, start: Cell, target: Cell) -> list[str] | None:
    """Finds a shortest path by breadth-first search; None if there is no path."""
    paths: dict[Cell, list[str]] = {start: []}
    frontier = deque([start])
    while frontier:
        cell = frontier.popleft()
        if cell == target:
            return paths[cell]
        for action in MOVES:
            after = _moved(cell, action, size)
            if after not in holes and after not in paths:
                paths[after] = [*paths[cell], action]
                frontier.append(after)
    return None


def _moved(cell: Cell, action: str, size: Cell) -> Cell:
    """The next cell; the edge of the lake holds the player."""
    row, column = MOVES[action]
    return min(max(cell[0] + row, 0), size[0] - 1), min(max(cell[1] + column, 0), size[1] - 1)
