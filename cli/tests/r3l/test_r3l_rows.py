"""The rows that the scripts of examples/R3L write are rows that their environments play."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trinity.config import load, make_plan
from trinity.config.workflows import R3L_WORKFLOWS
from trinity.environments import ENVIRONMENTS
from trinity.environments.alfworld.engine import write_game
from trinity.environments.alfworld.rooms import draw_room
from trinity.environments.webshop.mini import GOALS

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[3] / "examples/R3L"
FEW = ("--train", "8", "--test", "2")


def write_rows(environment: str, folder: Path, *arguments: str) -> dict[str, list[dict[str, Any]]]:
    """File name -> its rows."""
    script = ROOT / environment / f"get_{environment}_data.py"
    command = [sys.executable, str(script), *arguments, "--output", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {p.stem: [json.loads(line) for line in p.read_text().splitlines()] for p in folder.glob("*.jsonl")}


def begin_all(environment: str, files: dict[str, list[dict[str, Any]]]) -> int:
    """Reset an episode of every row, with the arguments that the experiment's YAML gives."""
    (taskset,) = make_plan(load(ROOT / environment / "opmd_R3L_1.5B.yaml")).tasksets
    rules = R3L_WORKFLOWS[str(taskset.default_workflow_type)].with_args(dict(taskset.workflow_args))
    rows = [row for found in files.values() for row in found]
    for row in rows:
        game: Any = ENVIRONMENTS[rules.environment]()
        try:
            assert game.reset(row, rules.environment_args, 7).text, row
        finally:
            game.close()
    return len(rows)


@pytest.mark.parametrize("environment", ["webshop", "countdown", "sokoban", "gym_card"])
def test_made_rows_are_played(environment: str, tmp_path: Path) -> None:
    files = write_rows(environment, tmp_path, *FEW)
    assert begin_all(environment, files) == 8 + 2 * (len(files) - 1)
    if environment == "gym_card":
        assert {row["game"] for row in files["train"]} == {"number_line", "ez_points", "points24", "blackjack"}


def test_rows_of_maths_questions_are_played(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text('{"problem": "2+2?", "answer": 4}\n')
    source = str(tmp_path / "questions.jsonl")
    files = write_rows("dapo", tmp_path / "dapo", "--train", source, "--test", f"aime24={source}")
    assert begin_all("dapo", files) == 2


def test_rows_of_a_household_are_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("alfworld")
    for seed, split in enumerate(("train", "train", "valid_seen")):
        game = tmp_path / "json_2.1.1" / split / f"look_at_obj_in_light-{seed}/trial_1/game.tw-pddl"
        game.parent.mkdir(parents=True)
        write_game(draw_room("look_at_obj_in_light", seed), game)
    files = write_rows("alfworld", tmp_path / "rows", "--data-path", str(tmp_path / "json_2.1.1"))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    assert begin_all("alfworld", files) == 3


@pytest.mark.parametrize("counts", [("4096", "100"), ("10", "3")])
def test_the_small_shop_trains_no_goal_that_it_tests(tmp_path: Path, counts: tuple[str, str]) -> None:
    train, test = counts
    files = write_rows("webshop", tmp_path, "--backend", "mini", "--train", train, "--test", test)
    goals = {name: {row["session_id"] % len(GOALS) for row in rows} for name, rows in files.items()}
    assert (len(files["train"]), len(files["test"])) == (int(train), int(test))
    assert not goals["train"] & goals["test"]
    real = write_rows("webshop", tmp_path, "--backend", "local", "--train", train, "--test", test)
    assert [row["session_id"] for row in real["train"] + real["test"]] == list(range(int(train) + int(test)))


def test_the_yamls_of_webshop_play_the_shop_that_the_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_WEBSHOP_BACKEND", "http")
    monkeypatch.setenv("TRINITY_WEBSHOP_URL", "http://10.0.0.5:3000")
    plan = make_plan(load(ROOT / "webshop/grpo_7B.yaml"))
    for taskset in (*plan.tasksets, *plan.eval_tasksets):
        assert taskset.workflow_args["environment_args"] == {"backend": "http", "url": "http://10.0.0.5:3000"}


def test_rows_of_science_are_played(tmp_path: Path) -> None:
    pytest.importorskip("scienceworld")
    files = write_rows("scienceworld", tmp_path, "--train", "1", "--test", "1")
    some = {name: rows[:3] for name, rows in files.items()}
    assert begin_all("scienceworld", some) == 6
