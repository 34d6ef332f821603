"""Sudoku: several cells a turn, and the first wrong one ends the game (Trinity-RFT's sudoku_workflow)."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.game import OnInvalid, Refused, TextGame, Turn, TurnRules
from trinity.environments.replies import Reply, ReplyFormat
from trinity.sdk.environment import Description

Board = list[list[int]]  # 9 x 9, 0: empty
_SIZE, _BLOCK = 9, 3
_MOST_MOVES = 5


class Sudoku(TextGame):
    """Reward 1 when the board is the solution, -1 for a reply that breaks a rule, which ends the episode.

    A row is {"puzzle", "solution"}, 9 lists of 9 numbers each, 0 being an empty cell; or {"seed", "empty"} for a drawn
    one with that many empty cells (30) and one solution. A reply is up to five lines `row column value`, the first two
    from 0. A cell that is full, or a value that is in its row, column or block already, breaks a rule.
    """

    description = Description("sudoku", "Fill a Sudoku, a few cells at a time.", deterministic=True)
    isolation = "none"
    defaults = TurnRules(
        max_steps=20,
        reply_format=ReplyFormat.PLAIN,
        on_invalid_format=OnInvalid.END,
        on_invalid_action=OnInvalid.END,
        end_penalty=1.0,
    )
    instructions = (
        "You solve a Sudoku. Every row, column and 3x3 block must hold each of 1 to 9 once. 0 is an empty cell; only "
        "empty cells may be filled.\n"
        f"Reply with one to {_MOST_MOVES} lines and nothing else, each of them: row column value. Rows and columns are "
        "counted from 0. For example:\n0 2 4\n1 3 5"
    )
    goal = "Fill the board."

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        if "puzzle" in task or "solution" in task:
            self.board, self.solution = _board(task, "puzzle", 0), _board(task, "solution", 1)
        else:
            empty = task.integer("empty", 30, low=1, high=50)
            self.board, self.solution = draw(task.integer("seed", seed), empty)
        return self._text()

    def read(self, reply: str) -> Reply:
        found = super().read(reply)
        if found.problem or self.rules.reply_format != ReplyFormat.PLAIN:
            return found
        said = reply.rpartition("</think>")[2].splitlines()
        lines = [line.split() for line in said if line.strip() and not line.lstrip().startswith("```")]
        if len(lines) > _MOST_MOVES or not all(len(line) == 3 for line in lines):
            return Reply(problem=f"the reply must be 1 to {_MOST_MOVES} lines: row column value")
        return replace(found, action=" ".join(part for line in lines for part in line))

    def refusal(self, action: str) -> str:
        parts = action.split()
        if not parts or len(parts) % 3 or len(parts) > 3 * _MOST_MOVES:
            return f"{action!r:.60} is not 1 to {_MOST_MOVES} times: row column value"
        if not all(part.isascii() and part.isdigit() and len(part) == 1 for part in parts):
            return "rows and columns are from 0 to 8, values from 1 to 9"
        if any(row > 8 or column > 8 or not value for row, column, value in _moves(action)):
            return "rows and columns are from 0 to 8, values from 1 to 9"
        return ""

    def play(self, action: str) -> Turn:
        board = [[*row] for row in self.board]
        for row, column, value in _moves(action):
            if board[row][column]:
                raise Refused(f"the cell {row} {column} is not empty")
            board[row][column] = value
        if not _is_valid(board):
            raise Refused("a number is twice in a row, column or block")
        self.board = board
        solved = board == self.solution
        return Turn(self._text(), float(solved), done=solved, success=solved)

    def _text(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.board)

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        game = cls()
        game.reset(task, args, seed)
        cells = [(r, c) for r in range(_SIZE) for c in range(_SIZE) if not game.board[r][c]]
        lines = [f"{row} {column} {game.solution[row][column]}" for row, column in cells]
        return ["\n".join(lines[n : n + _MOST_MOVES]) for n in range(0, len(lines), _MOST_MOVES)]


def draw(seed: int, empty: int) -> tuple[Board, Board]:
    """A puzzle with `empty` cells to fill (or as many as leave one solution), and its solution."""
    numbers = random.Random(f"sudoku {seed}")

    def shuffled() -> list[int]:
        """Rows or columns in an order that leaves blocks what they are."""
        return [3 * block + line for block in numbers.sample(range(3), 3) for line in numbers.sample(range(3), 3)]

    rows, columns, values = shuffled(), shuffled(), numbers.sample(range(1, 10), 9)
    solution = [[values[(3 * (row % 3) + row // 3 + column) % 9] for column in columns] for row in rows]
    puzzle = [[*row] for row in solution]
    for cell in numbers.sample(range(81), 81):
        if sum(row.count(0) for row in puzzle) == empty:
            break
        row, column = divmod(cell, _SIZE)
        puzzle[row][column] = 0
        if len(list(_solutions([[*line] for line in puzzle], most=2))) != 1:
            puzzle[row][column] = solution[row][column]
    return puzzle, solution


def _solutions(board: Board, most: int) -> Iterator[None]:
    """Yields one item for each solution, `most` at most; tries the cell with the fewest choices first."""
    cells = [(r, c) for r in range(_SIZE) for c in range(_SIZE) if not board[r][c]]
    if not cells:
        yield None
        return
    row, column = min(cells, key=lambda cell: len(_fitting(board, *cell)))
    found = 0
    for value in _fitting(board, row, column):
        board[row][column] = value
        for _ in _solutions(board, most - found):
            found += 1
            yield None
        board[row][column] = 0
        if found >= most:
            return


def _fitting(board: Board, row: int, column: int) -> set[int]:
    top, left = row - row % _BLOCK, column - column % _BLOCK
    block = {board[r][c] for r in range(top, top + _BLOCK) for c in range(left, left + _BLOCK)}
    return set(range(1, 10)) - {*board[row]} - {line[column] for line in board} - block


def _is_valid(board: Board) -> bool:
    """No number is twice in a row, a column or a block."""
    columns = [[*column] for column in zip(*board, strict=True)]
    blocks = [
        [board[r][c] for r in range(top, top + _BLOCK) for c in range(left, left + _BLOCK)]
        for top in range(0, _SIZE, _BLOCK)
        for left in range(0, _SIZE, _BLOCK)
    ]
    there = [[value for value in group if value] for group in (*board, *columns, *blocks)]
    return all(len(group) == len({*group}) for group in there)


def _moves(action: str) -> list[tuple[int, int, int]]:
    numbers = [int(part) for part in action.split()]
    return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


def _board(task: Arguments, name: str, low: int) -> Board:
    rows = task.get(name, None)
    good = isinstance(rows, list) and len(rows) == _SIZE
    good = good and all(isinstance(row, list) and len(row) == _SIZE for row in rows)
    if not good or not all(type(value) is int and low <= value <= 9 for row in rows for value in row):
        raise task.wrong(name, rows, f"9 lists of 9 numbers from {low} to 9")
    return [[*row] for row in rows]
