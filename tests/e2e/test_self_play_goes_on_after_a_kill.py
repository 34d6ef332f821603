"""A whole run plays Nim by self-play and against older versions; its explorer is killed in the middle of games.

On real vLLM and DeepSpeed. What is trained are the moves of the policy alone, each seat with its own reward; every task
is trained once, and the evaluations rate the versions.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.programs.run import TrinityRun, kill_process, write_config
from trinity.archive.reader import read_experiences
from trinity.study.results import collect

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, PILES, GAMES, EVERY = 6, 4, 4, 2


@pytest.fixture
def run(repository: Path, tmp_path: Path) -> Any:
    """A short warm-up: the model knows most moves."""
    make = [sys.executable, "examples/players/make_nim.py", str(tmp_path), "--steps", "40"]
    subprocess.run(make, check=True, cwd=repository, timeout=300)
    archive = {"path": str(tmp_path / "trained.jsonl"), "storage_type": "file"}
    changes: dict[str, Any] = {
        "algorithm": {"repeat_times": GAMES},
        "buffer": {"batch_size": PILES, "total_steps": STEPS, "trainer_input": {"experience_buffer": archive}},
        "explorer": {"eval_interval": EVERY, "older_versions": {"every": EVERY, "keep": 2}},
        "synchronizer": {"versions_to_keep": 6},
        "trainer": {"save_interval": 2},
    }
    config = write_config(repository / "examples/players/nim.yaml", tmp_path / "nim.yaml", changes)
    given = {"TRINITY_TASKSET_PATH": str(tmp_path / "data"), "TRINITY_MODEL_PATH": str(tmp_path / "model")}
    started = TrinityRun(config, tmp_path, **given)
    yield started
    started.end()


def test_games_are_trained_once_and_versions_are_rated(run: TrinityRun, tmp_path: Path) -> None:
    run.start()
    kill_process(run.until(lambda status: (status["step"] or 0) >= 3, 400, "three steps"), "explorer")
    assert run.finish(400) == 0, run.tail()

    groups = list(read_experiences(str(tmp_path / "trained.jsonl"), "experience_buffer"))
    assert len({group.task.task_id for group in groups}) == len(groups) == STEPS * PILES
    opponents = set()
    for group in groups:
        rewards: dict[int, list[float]] = {}
        for one in group.experiences:
            info = json.loads(one.info_json)
            seats = set(info["seats"].values())
            assert info["seats"][info["player"]] == "policy" and info["group"] == info["player"]
            assert all(span.version < STEPS for span in one.version_spans)
            rewards.setdefault(one.rollout // 2, []).append(one.reward)
            opponents |= seats - {"policy"}
            assert (len(seats) == 2) == ("score" in one.metrics)
        assert all(sum(of_game) == 0 for of_game in rewards.values() if len(of_game) == 2), "one wins, one loses"
    assert opponents <= {f"version {step}" for step in range(0, STEPS, EVERY)}
    assert "version 0" in opponents, "the only older version of the first steps"

    (curve,) = [one for one in collect([run.job], ["rating"]) if one.taskset == "against-older"]
    assert [step for step, _ in curve.points] == list(range(0, STEPS + 1, EVERY))
    loads = [
        event["position"]
        for file in run.job.rglob("log/explorer*.log")
        for event in map(json.loads, file.read_text().splitlines())
        if event["event"] == "sampler.adapters.loaded"
    ]
    assert {0, 2} <= set(loads), "each older version passed its canary before it played"
