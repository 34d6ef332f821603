"""Levels that can be solved by construction: begin with every box on its target and pull them away."""

import random

from trinity.environments.sokoban.level import MOVES, Cell, Level
from trinity.runtime.errors import InvalidInput

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
