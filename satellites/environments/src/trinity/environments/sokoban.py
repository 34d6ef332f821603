"""Sokoban as a text game.

Levels are immutable, solved by A* and made by pulling boxes away from their targets. As text: `#` wall, `_` floor,
`O` target, `X` box, `√` box on a target, `P` player, `S` player on a target.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.game import FORMAT_HINT, TextGame, Turn, TurnRules, Unsolvable, replies
from trinity.runtime.errors import InvalidInput
from trinity.sdk.environment import Description

Cell = tuple[int, int]  # row, column
MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
MAX_SIDE = 12


@dataclass(frozen=True)
class Level:
    """A position. Walls and targets never change, the player and the boxes do."""

    rows: int
    columns: int
    walls: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def solved(self) -> bool:
        return self.boxes == self.targets

    @property
    def boxes_on_targets(self) -> int:
        return len(self.boxes & self.targets)

    def move(self, action: str) -> "Level":
        """The position after a move; the same one if a wall, or a box that cannot be pushed, is in the way."""
        step = MOVES[action]
        ahead = _add(self.player, step)
        if ahead in self.walls:
            return self
        if ahead not in self.boxes:
            return replace(self, player=ahead)
        beyond = _add(ahead, step)
        if beyond in self.walls or beyond in self.boxes:
            return self
        return replace(self, player=ahead, boxes=self.boxes - {ahead} | {beyond})

    def text(self) -> str:
        return "\n".join("".join(self._symbol((r, c)) for c in range(self.columns)) for r in range(self.rows))

    def _symbol(self, cell: Cell) -> str:
        on_target = cell in self.targets
        if cell in self.walls:
            return "#"
        if cell == self.player:
            return "S" if on_target else "P"
        if cell in self.boxes:
            return "√" if on_target else "X"
        return "O" if on_target else "_"

    @classmethod
    def parse(cls, text: str, field: str = "task.level") -> "Level":
        """Reads a level. Raises InvalidInput that names its problem."""
        lines = [line.strip() for line in text.strip().splitlines()]
        if not lines or len(lines) > MAX_SIDE or max(map(len, lines)) > MAX_SIDE:
            raise InvalidInput(field, f"must have 1 to {MAX_SIDE} lines of at most {MAX_SIDE} symbols")
        cells = {(r, c): symbol for r, line in enumerate(lines) for c, symbol in enumerate(line)}
        if unknown := set(cells.values()) - set("#_OX√PS"):
            raise InvalidInput(field, f"has the symbols {sorted(unknown)}; known are # _ O X √ P S")

        def those(symbols: str) -> frozenset[Cell]:
            return frozenset(cell for cell, symbol in cells.items() if symbol in symbols)

        players, boxes, targets = those("PS"), those("X√"), those("O√S")
        if len(players) != 1 or not boxes or len(boxes) != len(targets):
            raise InvalidInput(
                field,
                f"must have one player and as many boxes as targets, at least one; "
                f"has {len(players)} players, {len(boxes)} boxes, {len(targets)} targets",
            )
        rows, columns = len(lines), max(map(len, lines))
        # outside is wall: a level whose border is open cannot be left
        border = frozenset((r, c) for r in range(-1, rows + 1) for c in range(-1, columns + 1)) - cells.keys()
        return cls(rows, columns, those("#") | border, targets, boxes, next(iter(players)))


def _add(cell: Cell, step: Sequence[int]) -> Cell:
    return cell[0] + step[0], cell[1] + step[1]


MAX_POSITIONS = 300_000


def solve(level: Level, max_positions: int = MAX_POSITIONS) -> list[str]:
    """The moves of a shortest solution. Raises Unsolvable if there is none within `max_positions` positions."""
    order = count()
    start = (level.player, level.boxes)
    came_from: dict[tuple[Cell, frozenset[Cell]], tuple[tuple[Cell, frozenset[Cell]], str] | None] = {start: None}
    length = {start: 0}
    frontier = [(_distance(level), next(order), level)]
    while frontier:
        _, _, position = heapq.heappop(frontier)
        key = (position.player, position.boxes)
        if position.solved:
            moves: list[str] = []
            while (step := came_from[key]) is not None:
                key = step[0]
                moves.append(step[1])
            return moves[::-1]
        if len(length) > max_positions:
            break
        for action in MOVES:
            after = position.move(action)
            next_key = (after.player, after.boxes)
            if after is position or length.get(next_key, 1 << 30) <= length[key] + 1 or _stuck(after):
                continue
            length[next_key] = length[key] + 1
            came_from[next_key] = (key, action)
            heapq.heappush(frontier, (length[next_key] + _distance(after), next(order), after))
    raise Unsolvable(f"no solution among {len(length)} positions")


def _distance(level: Level) -> int:
    """Moves that are needed at least: each box must be pushed to some target."""
    return sum(min(abs(r - tr) + abs(c - tc) for tr, tc in level.targets) for r, c in level.boxes)


def _stuck(level: Level) -> bool:
    """Tells if a box is in a corner without a target, where it stays forever."""
    for row, column in level.boxes - level.targets:
        vertical = (row - 1, column) in level.walls or (row + 1, column) in level.walls
        horizontal = (row, column - 1) in level.walls or (row, column + 1) in level.walls
        if vertical and horizontal:
            return True
    return False


_TRIES = 200


def generate(rows: int, columns: int, boxes: int, walls: float, seed: int) -> Level:
    """A level with no box on a target at the start. `walls`: the share of inner cells that become walls, 0 to 0.5.

    Raises InvalidInput if the room is too small for the boxes.
    """
    random_numbers = random.Random(f"sokoban {rows} {columns} {boxes} {walls} {seed}")
    for _ in range(_TRIES):
        level = _solved(rows, columns, boxes, walls, random_numbers)
        if level is None:
            continue
        level = _pull_away(level, random_numbers)
        if level.boxes_on_targets == 0:
            return level
    raise InvalidInput("task.boxes", f"is {boxes}, too many for a room of {rows} x {columns} with walls {walls:g}")


def _solved(rows: int, columns: int, boxes: int, walls: float, random_numbers: random.Random) -> Level | None:
    """A room of one piece with every box on a target; None if there is not enough floor."""
    everywhere = {(r, c) for r in range(rows) for c in range(columns)}
    inner = sorted((r, c) for r in range(1, rows - 1) for c in range(1, columns - 1))
    inner_walls = {cell for cell in inner if random_numbers.random() < walls}
    floor = _connected(set(inner) - inner_walls, random_numbers)
    if len(floor) < 2 * boxes + 1:
        return None
    *targets, player = random_numbers.sample(sorted(floor), boxes + 1)
    return Level(rows, columns, frozenset(everywhere - floor), frozenset(targets), frozenset(targets), player)


def _connected(cells: set[Cell], random_numbers: random.Random) -> set[Cell]:
    """The cells that can be reached from a random one of them."""
    if not cells:
        return cells
    start = random_numbers.choice(sorted(cells))
    found, frontier = {start}, [start]
    while frontier:
        row, column = frontier.pop()
        near = {(row + r, column + c) for r, c in MOVES.values()} & cells - found
        found |= near
        frontier += sorted(near)
    return found


def _pull_away(level: Level, random_numbers: random.Random) -> Level:
    """A random walk that drags a box along whenever it leaves one behind: every such step undone is a legal push."""
    walls, boxes, player = level.walls, set(level.boxes), level.player
    for _ in range(10 * level.rows * level.columns):
        row, column = random_numbers.choice(list(MOVES.values()))
        ahead = player[0] + row, player[1] + column
        behind = player[0] - row, player[1] - column
        if ahead in walls or ahead in boxes:
            continue
        if behind in boxes and random_numbers.random() < 0.8:
            boxes = boxes - {behind} | {player}
        player = ahead
    return Level(level.rows, level.columns, walls, level.targets, frozenset(boxes), player)


STEP_REWARD = -0.1
BOX_REWARD = 1.0
SOLVED_REWARD = 10.0


class Sokoban(TextGame):
    """Push every box onto a target.

    A row is {"size", "boxes", "walls", "seed"} (all optional; the episode's seed stands in for a missing one) or
    {"level": text}. `rewards: dense` (default): -0.1 for a step, +1 for a box that comes onto a target, -1 for one
    that leaves it, +10 for the last; `sparse`: 1 at the end and nothing before.
    """

    description = Description("sokoban", "Push every box onto a target.", deterministic=True)
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
