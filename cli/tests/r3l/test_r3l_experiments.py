"""The experiments of examples/R3L: their files, `trinity check` of each, and the scripts that make their data."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trinity.cli.supervise.checks.preflight import check_inputs
from trinity.config import ConfigError, load, make_plan
from trinity.config.workflows import EPISODE_WORKFLOWS, R3L_WORKFLOWS

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[3] / "examples/R3L"
ENVIRONMENTS = ("alfworld", "webshop", "scienceworld", "dapo", "countdown", "sokoban", "gym_card")
ALGORITHMS = {
    "grpo": "grpo",
    "dapo": "dapo",
    "opmd": "opmd",
    "RAFT": "raft",
    "opmd_reweight_adv": "opmd_reweight_adv",
    "opmd_R3L": "opmd_reweight_adv",
}


def run(script: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_yamls_are_what_the_script_writes() -> None:
    run(ROOT.parent / "generate.py", "--check")
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/*B.yaml")}
    assert files == {f"{e}/{a}_{s}.yaml" for e in ENVIRONMENTS for a in ALGORITHMS for s in ("1.5B", "7B")}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_yaml_is_accepted_and_is_what_its_name_says(environment: str) -> None:
    names: set[Path] = set()
    for name, algorithm in ALGORITHMS.items():
        for size, engines in (("1.5B", 6), ("7B", 4)):
            plan = make_plan(load(ROOT / environment / f"{name}_{size}.yaml"))
            names.add(plan.job_dir)
            assert plan.config.algorithm.algorithm_type == algorithm
            assert size in plan.config.model.model_path
            assert (plan.gpus.explorer, plan.gpus.trainer) == (engines, 8 - engines)
            known = R3L_WORKFLOWS if name == "opmd_R3L" else EPISODE_WORKFLOWS
            for taskset in (*plan.tasksets, *plan.eval_tasksets):
                assert taskset.default_workflow_type in known
                assert environment in str(taskset.default_workflow_type)
            reply = known[str(plan.tasksets[0].default_workflow_type)].max_response_tokens
            assert reply == plan.lengths.response, "a turn may be as long as the environment's rules say"
    assert len(names) == 12, "no run continues another's"


def deep_check(environment: str, folder: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> int:
    monkeypatch.setenv("TRINITY_R3L_DATA", str(folder))
    monkeypatch.setenv("TRINITY_MODEL_PATH", str(model))
    path = ROOT / environment / "opmd_R3L_1.5B.yaml"
    overrides = ["buffer.batch_size=2", "model.max_model_len=4096", "model.max_response_tokens=512"]
    return check_inputs(make_plan(load(path, overrides)), str(path))


@pytest.mark.parametrize(
    ("environment", "arguments"),
    [
        ("webshop", ("--train", "6", "--test", "2")),
        ("countdown", ("--train", "6", "--test", "2")),
        ("sokoban", ("--train", "6", "--test", "2")),
        ("gym_card", ("--train", "6", "--test", "2")),
    ],
)
def test_a_script_prepares_the_data_that_its_yamls_read(
    environment: str,
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quickstart_model: Path,
) -> None:
    with pytest.raises(ConfigError, match="taskset"):
        deep_check(environment, tmp_path, monkeypatch, quickstart_model)
    folder = tmp_path / environment
    run(ROOT / environment / f"get_{environment}_data.py", *arguments, "--output", str(folder))
    assert deep_check(environment, tmp_path, monkeypatch, quickstart_model) == 20 * 6 // 2
    train = {json.dumps(row) for row in rows(folder / "train.jsonl")}
    tests = [json.dumps(row) for path in folder.glob("test*.jsonl") for row in rows(path)]
    assert len(train) == 6
    assert not train & set(tests), "what is tested is not trained"


def test_alfworlds_games_that_cannot_be_won_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quickstart_model: Path
) -> None:
    games = tmp_path / "json_2.1.1"
    for split, name, solvable in (
        ("train", "pick_and_place_simple-Apple", True),
        ("train", "pick_and_place_simple-AppleSliced", True),
        ("train", "pick_two-movable", True),
        ("train", "look_at-Book", False),
        ("train", "pick_heat-Egg", True),
        ("valid_seen", "pick_cool-Cup", True),
    ):
        folder = games / split / name / "trial_1"
        folder.mkdir(parents=True)
        (folder / "game.tw-pddl").write_text(json.dumps({"solvable": solvable}))
    script = ROOT / "alfworld/get_alfworld_data.py"
    run(script, "--data-path", str(games), "--output", str(tmp_path / "alfworld"))
    found = [Path(row["game_file"]).parts[-3] for row in rows(tmp_path / "alfworld/train.jsonl")]
    assert found == ["pick_and_place_simple-Apple", "pick_heat-Egg"]
    assert deep_check("alfworld", tmp_path, monkeypatch, quickstart_model) == 20
    done = run(script, "--data-path", str(tmp_path / "nowhere"), "--output", str(tmp_path), code=1)
    assert "give the folder with --data-path" in done.stderr


def test_maths_questions_of_every_form_become_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quickstart_model: Path
) -> None:
    dapo = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}
    (tmp_path / "dapo.jsonl").write_text(f"{json.dumps(dapo)}\n{json.dumps(dapo)}\n")
    (tmp_path / "aime.jsonl").write_text('{"problem": "2+2?", "answer": 4}\n')
    (tmp_path / "olympiad.jsonl").write_text('{"question": "3+3?", "final_answer": ["6"]}\n')
    names = ("aime24", "aime25", "amc23", "gsm8k", "math500", "minerva")
    tests = [f"--test={name}={tmp_path / 'aime.jsonl'}" for name in names]
    tests.append(f"--test=olympiad={tmp_path / 'olympiad.jsonl'}")
    script = ROOT / "dapo/get_dapo_data.py"
    run(script, "--train", str(tmp_path / "dapo.jsonl"), *tests, "--output", str(tmp_path / "dapo"))
    assert rows(tmp_path / "dapo/train.jsonl") == [{"question": "1+1?", "answer": "2"}], "equal ones once"
    assert rows(tmp_path / "dapo/aime24.jsonl") == [{"question": "2+2?", "answer": "4"}]
    assert rows(tmp_path / "dapo/olympiad.jsonl") == [{"question": "3+3?", "answer": "6"}]
    assert deep_check("dapo", tmp_path, monkeypatch, quickstart_model) == 10
    (tmp_path / "bad.jsonl").write_text('{"text": "1"}\n')
    done = run(script, "--train", str(tmp_path / "bad.jsonl"), *tests, "--output", str(tmp_path), code=1)
    assert "row 0 of" in done.stderr
    assert "has no question or no answer; it has text" in done.stderr


def test_scienceworlds_tasks_are_split_as_the_simulator_splits_them(tmp_path: Path) -> None:
    pytest.importorskip("scienceworld")
    script = ROOT / "scienceworld/get_scienceworld_data.py"
    run(script, "--train", "2", "--test", "1", "--output", str(tmp_path))
    train, test = rows(tmp_path / "train.jsonl"), rows(tmp_path / "test.jsonl")
    assert len({row["task_name"] for row in train}) == 30
    assert len(train) <= 60
    pairs = [{(row["task_name"], row["var_num"]) for row in split} for split in (train, test)]
    assert not pairs[0] & pairs[1]


def test_a_rule_that_does_not_exist_is_found_by_check(tmp_path: Path) -> None:
    text = (ROOT / "sokoban/opmd_R3L_1.5B.yaml").read_text()
    bad = text.replace("R3L_sokoban_workflow\n", "R3L_sokoban_workflow\n      workflow_args: {max_turn: 3}\n", 1)
    path = tmp_path / "bad.yaml"
    path.write_text(bad)
    with pytest.raises(ConfigError, match=r"taskset\.workflow_args\.max_turn: unknown key; did you mean .max_turns"):
        load(path)
