"""FrozenLake: the map, the moves, the ways to name one."""

import pytest

from support.fakes.environments.playing import play
from trinity.environments.arguments import Arguments
from trinity.environments.frozen_lake import FrozenLake, read_map, shortest_path
from trinity.environments.game import Unsolvable
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

LAKE = {"desc": ["SFH", "FHF", "FFG"]}


def test_the_way_to_the_goal() -> None:
    played = play(FrozenLake(), ["```Down```", "2", "<action>right</action>", "Right"], LAKE)
    assert played.won
    assert [o.reward for o in played.observations] == [0, 0, 0, 0, 1]
    assert played.observations[0].info["observation"] == "P\t_\tO\n_\tO\t_\n_\t_\tG"
    assert played.last.info["observation"] == "_\t_\tO\n_\tO\t_\n_\t_\t√"


def test_a_hole_ends_the_episode_without_reward() -> None:
    played = play(FrozenLake(), ["Right", "Right"], LAKE)
    assert (played.last.done, played.reward, played.won) == (True, 0, False)
    assert "X" in played.last.text


def test_the_edge_holds_and_an_unknown_move_is_told() -> None:
    played = play(FrozenLake(), ["Up", "```Jump```"], LAKE)
    assert played.last.text.startswith("Nothing happens: 'Jump'")
    assert played.last.metrics["invalid_action"] == 1
    assert "P\t_\tO" in played.last.text


@pytest.mark.parametrize("seed", range(60))
def test_a_drawn_map_has_a_path_within_the_limit(seed: int) -> None:
    longest = 2 + seed % 7
    holes, size, start, target = read_map(
        Arguments({"size": 5, "p": 0.7}), Arguments({"path_max_steps": longest}), seed
    )
    path = shortest_path(holes, size, start, target)
    assert path is not None
    assert 1 <= len(path) <= longest
    assert start not in holes
    assert target not in holes


def test_the_rows_seed_makes_the_map_and_the_episodes_seed_stands_in() -> None:
    def first(task: dict[str, int], seed: int) -> str:
        return play(FrozenLake(), [], task, seed=seed).last.text

    assert first({"seed": 3}, 1) == first({"seed": 3}, 2) == first({}, 3)
    assert len({first({}, seed) for seed in range(10)}) > 5


def test_slippery_ice_moves_sideways_and_is_the_same_for_the_same_seed() -> None:
    def path(seed: int) -> list[str]:
        replies = ["Right"] * 6
        played = play(FrozenLake(), replies, {"desc": ["FFFFFFF", "SFFFFFF", "FFFFFFG"]}, {"is_slippery": True}, seed)
        return [o.info["observation"] for o in played.observations]

    assert path(1) == path(1)
    assert len({tuple(path(seed)) for seed in range(10)}) > 5
    with pytest.raises(Unsolvable):
        FrozenLake.oracle({}, {"is_slippery": True}, 0)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"desc": ["SF", "F"]}, "task.desc"),
        ({"desc": ["SS", "FG"]}, "task.desc"),
        ({"desc": "SG"}, "task.desc"),
        ({"desc": [["S"], ["G"]]}, "task.desc"),
        ({"size": 1}, "task.size"),
        ({"p": 2}, "task.p"),
    ],
)
def test_a_bad_row_is_refused_with_its_field(task: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        FrozenLake().reset(task, {}, 0)
    assert said in str(refused.value)
