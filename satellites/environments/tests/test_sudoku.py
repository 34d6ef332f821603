"""Sudoku: what a turn may hold, what ends the game, and boards that have one solution."""

import pytest

from support.fakes.environments.playing import play
from trinity.environments.sudoku import Sudoku, draw
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

SOLUTION = [[(3 * (row % 3) + row // 3 + column) % 9 + 1 for column in range(9)] for row in range(9)]


def row_with(*empty: tuple[int, int]) -> dict[str, list[list[int]]]:
    puzzle = [[0 if (r, c) in empty else SOLUTION[r][c] for c in range(9)] for r in range(9)]
    return {"puzzle": puzzle, "solution": SOLUTION}


def test_the_board_is_filled_over_turns() -> None:
    task = row_with((0, 0), (0, 1), (8, 8))
    played = play(Sudoku(), ["0 0 1\n\n 0 1 2 ", f"8 8 {SOLUTION[8][8]}"], task)
    assert played.won
    assert [o.reward for o in played.observations] == [0, 0, 1]
    assert played.observations[0].text.splitlines()[-9] == "0 0 3 4 5 6 7 8 9"
    assert played.observations[1].text.splitlines()[-9] == "1 2 3 4 5 6 7 8 9"


@pytest.mark.parametrize("lines", ["{}", "```\n{}\n```", "```text\n{}\n```\n"])
@pytest.mark.parametrize("thought", ["", "<think>The first row\nlacks 0 0 2.</think>\n\n"])
def test_thoughts_and_a_fence_are_no_lines(thought: str, lines: str) -> None:
    said = thought + lines.format(f"0 0 1\n0 1 2\n8 8 {SOLUTION[8][8]}")
    assert play(Sudoku(), [said], row_with((0, 0), (0, 1), (8, 8))).won


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "```\n```",
        "```\nI fill\n0 0 1\n```",
        "0 0",
        "I fill 0 0 1",
        "0 0 1 0 1 2",  # two moves need two lines
        "9 0 1",
        "0 0 0",
        "0 0 -1",
        "0 0 ٣",
        "\n".join(["0 0 1"] * 6),
        "0 2 3",  # not empty
        "0 0 1\n0 0 1",
        "0 0 2\n0 1 2",  # twice in a row
        "0 0 5",  # in the block already
    ],
)
def test_a_reply_that_breaks_a_rule_ends_the_game_with_minus_one(reply: str) -> None:
    played = play(Sudoku(), [reply], row_with((0, 0), (0, 1), (8, 8)))
    assert (played.last.done, played.reward, played.won) == (True, -1, False)


def test_twenty_turns_are_the_limit() -> None:
    task = {"seed": 3, "empty": 30}
    winning = Sudoku.oracle(task, {}, 0)
    one_by_one = [line for reply in winning for line in reply.splitlines()][:20]
    played = play(Sudoku(), one_by_one, task)
    assert (played.last.done, played.reward, len(played.observations)) == (True, 0, 21)


@pytest.mark.parametrize("seed", range(5))
def test_a_drawn_board_is_won_by_its_oracle(seed: int) -> None:
    puzzle, solution = draw(seed, 40)
    assert sum(row.count(0) for row in puzzle) == 40
    assert all(sorted(group) == list(range(1, 10)) for group in (*solution, *zip(*solution, strict=True)))
    assert (puzzle, solution) == draw(seed, 40) != draw(seed + 1, 40)
    assert play(Sudoku(), Sudoku.oracle({"seed": seed}, {}, 0), {"seed": seed}).won


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ({"puzzle": [[0] * 9] * 9}, "task.solution: is None, must be 9 lists of 9 numbers from 1 to 9"),
        ({"puzzle": [[0] * 8] * 9, "solution": SOLUTION}, "task.puzzle: .* must be 9 lists of 9 numbers from 0 to 9"),
        ({"empty": 60}, "task.empty: is 60, must be an integer from 1 to 50"),
    ],
)
def test_rows_that_are_no_boards_are_refused(task: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        play(Sudoku(), [], task)
