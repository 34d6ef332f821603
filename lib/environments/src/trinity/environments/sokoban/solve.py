"""Shortest solutions by A*: the fewest moves, with the boxes' distances to their nearest targets as lower bound."""

import heapq
from itertools import count

from trinity.environments.game import Unsolvable
from trinity.environments.sokoban.level import MOVES, Cell, Level

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
    """Whether a box is in a corner that is no target: it stays there forever."""
    for row, column in level.boxes - level.targets:
        vertical = (row - 1, column) in level.walls or (row + 1, column) in level.walls
        horizontal = (row, column - 1) in level.walls or (row, column + 1) in level.walls
        if vertical and horizontal:
            return True
    return False
