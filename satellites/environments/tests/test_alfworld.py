"""ALFWorld on its real engine, with games made here: all task types, the rules, files, threads."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

pytest.importorskip("alfworld", reason="alfworld is not installed: pip install -e '.[alfworld]'")

from support.fakes.environments.playing import play, random_policy
from trinity.environments.alfworld.engine import Engine, write_game
from trinity.environments.alfworld.environment import AlfWorld
from trinity.environments.alfworld.rooms import TASK_TYPES, draw_room
from trinity.environments.replies import write
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.extended

TASK = {"task_type": "pick_heat_then_place_in_recep", "seed": 3}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_the_planner_wins_every_kind_of_task(task_type: str, seed: int) -> None:
    task = {"task_type": task_type, "seed": seed}
    replies = AlfWorld.oracle(task, {}, 0)
    played = play(AlfWorld(), replies, task)
    assert (played.reward, played.won) == (1, True)
    assert len(played.observations) == len(replies) + 1
    assert played.observations[0].info["task"].startswith(("put ", "examine "))


def test_an_episode_reads_as_alfworlds_do() -> None:
    played = play(AlfWorld(), [write("go to countertop 1"), write("dance"), write("inventory")], TASK)
    first, there, nothing, inventory = played.observations
    assert "You are in the middle of a room. Looking quickly around you, you see" in first.text
    assert f"Your task is to: {first.info['task']}" in first.text
    assert there.text.startswith("You arrive at countertop 1. On the countertop 1, you see ")
    assert nothing.text.startswith("Nothing happens: 'dance'")
    assert "You are not carrying anything." in inventory.text
    assert "go to fridge 1" in inventory.info["available_actions"]
    assert nothing.metrics["invalid_action"] == 1


def test_three_equal_actions_and_too_many_steps_end_without_reward() -> None:
    played = play(AlfWorld(), [write("look")] * 9, TASK)
    assert (len(played.observations), played.last.done, played.reward) == (4, True, 0)
    played = play(AlfWorld(), [write("look"), write("inventory")] * 9, TASK, {"max_steps": 4})
    assert (len(played.observations), played.last.done, played.won) == (5, True, False)


def test_a_random_policy_finishes() -> None:
    played = random_policy(AlfWorld(), TASK, {"max_steps": 12, "max_repeats": 0}, seed=1)
    assert played.last.done


def test_the_same_row_is_the_same_game() -> None:
    replies = AlfWorld.oracle(TASK, {}, 0)
    first, second = (play(AlfWorld(), replies, TASK, seed=seed) for seed in (1, 2))
    assert first.observations == second.observations


def test_a_game_that_was_played_is_not_translated_again() -> None:
    import fast_downward
    from textworld.envs.pddl import logic, textgen

    first = play(AlfWorld(), AlfWorld.oracle(TASK, {}, 0), TASK).observations
    kept = (fast_downward.pddl2sas, logic._parse_and_convert, textgen.Rule.parse_conjunctive_query)
    before = [function.cache_info().misses for function in kept]
    again = play(AlfWorld(), AlfWorld.oracle(TASK, {}, 0), TASK).observations
    assert (again, [function.cache_info().misses for function in kept]) == (first, before)


def test_threads_take_turns_and_see_their_own_game() -> None:
    tasks = [{"task_type": kind, "seed": 7} for kind in TASK_TYPES[:4]]
    plans = [AlfWorld.oracle(task, {}, 0) for task in tasks]
    alone = [play(AlfWorld(), plan, task).observations for task, plan in zip(tasks, plans, strict=True)]
    with ThreadPoolExecutor(4) as threads:
        together = threads.map(
            lambda pair: play(AlfWorld(), pair[1], pair[0]).observations, zip(tasks, plans, strict=True)
        )
    assert list(together) == alone


def test_games_that_end_leave_no_memory_behind_and_the_process_as_it_was() -> None:
    argv, output = list(sys.argv), sys.stdout

    def one(seed: int) -> None:
        play(AlfWorld(), [write("look")], {"seed": seed})

    one(0)
    before = psutil.Process().memory_info().rss
    for seed in range(12):
        one(seed)
    assert psutil.Process().memory_info().rss - before < 20 * 1024**2
    assert (sys.argv, sys.stdout) == (argv, output)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Game files as ALFWorld's download has them."""
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    for name in ("pick-Apple/trial_1", "pick-movable-Cup/trial_1", "pick-AppleSliced/trial_1", "pick-Mug/trial_1"):
        write_game(draw_room("pick_and_place_simple", 1), tmp_path / "train" / name / "game.tw-pddl")
    unsolvable = tmp_path / "train/pick-Mug/trial_1/game.tw-pddl"
    unsolvable.write_text(json.dumps({**json.loads(unsolvable.read_text()), "solvable": False}))
    return tmp_path


def test_game_files_are_found_and_played(data: Path) -> None:
    path = data / "train/pick-Apple/trial_1/game.tw-pddl"
    for name in (str(path), str(path.relative_to(data))):
        task = {"game_file": name}
        assert play(AlfWorld(), AlfWorld.oracle(task, {}, 0), task).won


@pytest.mark.parametrize("name", ["/etc/passwd", "../game.tw-pddl", "train/none/game.tw-pddl", "train"])
def test_no_file_but_the_games_is_read(data: Path, name: str) -> None:
    (data.parent / "game.tw-pddl").write_text("{}")
    with pytest.raises(InvalidInput, match=r"task\.game_file"):
        play(AlfWorld(), [], {"game_file": name})


def test_without_a_folder_of_games_the_variable_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InvalidInput, match="set ALFWORLD_DATA"):
        AlfWorld().reset({"game_file": "train/x/y/game.tw-pddl"}, {}, 0)
    with pytest.raises(InvalidInput, match=r"task\.task_type"):
        AlfWorld().reset({"task_type": "pick"}, {}, 0)


def test_a_broken_game_file_hurts_its_own_episode_alone(data: Path) -> None:
    (data / "train/broken.tw-pddl").write_text('{"pddl_domain": "(define"}')
    with pytest.raises(Exception, match=r".+"):
        Engine(data / "train/broken.tw-pddl")
    assert play(AlfWorld(), AlfWorld.oracle(TASK, {}, 0), TASK).won
