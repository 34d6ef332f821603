"""Sokoban: the rules, the generator, the solver."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fakes.environments.playing import play
from trinity.environments.game import Unsolvable
from trinity.environments.replies import write
from trinity.environments.sokoban import MOVES, Level, Sokoban, generate, solve
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

ROW = "#######\n#P_X_O#\n#######"


def moved(text: str, *actions: str) -> str:
    level = Level.parse(text)
    for action in actions:
        level = level.move(action)
    return level.text()


def test_a_box_is_pushed_and_never_pulled() -> None:
    assert moved(ROW, "right", "right") == "#######\n#__PXO#\n#######"
    assert moved(ROW, "right", "right", "left") == "#######\n#_P_XO#\n#######"


def test_walls_and_a_second_box_hold_a_box() -> None:
    assert moved("#####\n#PX##\n#_O_#\n#####", "right") == "#####\n#PX##\n#_O_#\n#####"
    assert moved("#######\n#PXX_O#\n#O____#\n#######", "right").splitlines()[1] == "#PXX_O#"


def test_symbols_on_targets() -> None:
    assert moved(ROW, "right", "right", "right") == "#######\n#___P√#\n#######"
    assert moved("#####\n#PO_#\n#_X_#\n#####", "right").splitlines()[1] == "#_S_#"
    assert Level.parse("#####\n#S√X#\n#####").text() == "#####\n#S√X#\n#####"


def test_dense_rewards_count_steps_boxes_and_the_end() -> None:
    right = write("right")
    played = play(Sokoban(), [right, right, right], {"level": ROW})
    assert [o.reward for o in played.observations] == pytest.approx([0, -0.1, -0.1, 10.9])
    assert played.won
    off = play(Sokoban(), [write("right")], {"level": "########\n#P√_OX_#\n########"})
    assert off.reward == pytest.approx(-1.1)


def test_sparse_rewards_are_one_at_the_end() -> None:
    played = play(Sokoban(), [write("right")] * 3, {"level": ROW}, {"rewards": "sparse"})
    assert [o.reward for o in played.observations] == [0, 0, 0, 1]


def test_the_solver_finds_the_fewest_moves_or_says_that_there_are_none() -> None:
    assert solve(Level.parse(ROW)) == ["right"] * 3
    with pytest.raises(Unsolvable):
        solve(Level.parse("#####\n#PX_#\n#__O#\n#####".replace("PX", "XP")))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(5, 7),
    columns=st.integers(5, 7),
    boxes=st.integers(1, 2),
    walls=st.floats(0, 0.2),
    seed=st.integers(),
)
def test_every_generated_level_can_be_solved(rows: int, columns: int, boxes: int, walls: float, seed: int) -> None:
    level = generate(rows, columns, boxes, walls, seed)
    assert level.boxes_on_targets == 0
    assert generate(rows, columns, boxes, walls, seed) == level
    for action in solve(level):
        level = level.move(action)
    assert level.solved


@given(st.lists(st.sampled_from(list(MOVES)), max_size=60), st.integers(0, 20))
def test_no_move_loses_a_box_or_enters_a_wall(actions: list[str], seed: int) -> None:
    level = generate(6, 6, 2, 0.1, seed)
    for action in actions:
        level = level.move(action)
        assert len(level.boxes) == 2
        assert not (level.boxes | {level.player}) & level.walls
        assert level.player not in level.boxes
        assert Level.parse(level.text()).text() == level.text()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"level": " "}, "task.level"),
        ({"level": "#P#"}, "as many boxes as targets"),
        ({"level": "PXO?"}, "symbols ['?']"),
        ({"level": "PPXO"}, "has 2 players"),
        ({"size": 3}, "task.size"),
        ({"size": "6"}, "task.size"),
        ({"size": 5, "boxes": 8}, "task.boxes"),
        ({"boxes": 0}, "task.boxes"),
        ({"walls": 0.9}, "task.walls"),
        ({"seed": 1.5}, "task.seed"),
    ],
)
def test_a_bad_row_is_refused_with_its_field(task: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Sokoban().reset(task, {}, 0)
    assert said in str(refused.value)
