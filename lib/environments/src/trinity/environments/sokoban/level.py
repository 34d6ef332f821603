"""The rules of Sokoban on immutable states, and their text: `#` wall, `_` floor, `O` target, `X` box, `√` box on a
target, `P` player, `S` player on a target."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trinity.runtime.errors import InvalidInput

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
        """From its text. Raises InvalidInput naming what is wrong with it."""
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
