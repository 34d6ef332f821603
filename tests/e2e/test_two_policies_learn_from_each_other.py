"""Two runs learn Nim from each other: each trains one policy, and the other's newest checkpoint sits opposite.

The runs use real vLLM and DeepSpeed. The test kills the explorer of one run and the trainer of the other. Each run must
train each of its tasks once. It must train only the moves of its own policy.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.programs.run import TrinityRun, kill_process, write_config
from trinity.archive.reader import read_experiences

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS, PILES, GAMES, SAVED = 8, 4, 4, 2


@pytest.fixture
def runs(repository: Path, tmp_path: Path) -> Iterator[dict[str, TrinityRun]]:
    make = [sys.executable, "examples/players/make_nim.py", str(tmp_path), "--steps", "40"]
    subprocess.run(make, check=True, cwd=repository, timeout=300)
    given = {"TRINITY_TASKSET_PATH": str(tmp_path / "data"), "TRINITY_MODEL_PATH": str(tmp_path / "model")}
    started = {}
    for name, rival in (("ann", "bob"), ("bob", "ann")):
        archive = {"path": str(tmp_path / f"{name}.jsonl"), "storage_type": "file"}
        changes: dict[str, Any] = {
            "name": name,
            "algorithm": {"repeat_times": GAMES},
            "buffer": {"batch_size": PILES, "total_steps": STEPS, "trainer_input": {"experience_buffer": archive}},
            "explorer": {"eval_interval": STEPS},
            "trainer": {"save_interval": SAVED},
        }
        config = write_config(repository / "examples/players/rivals.yaml", tmp_path / f"{name}.yaml", changes)
        started[name] = TrinityRun(config, tmp_path, RIVAL=rival, **given)
    yield started
    for run in started.values():
        run.end()


def test_each_trains_its_own_moves_against_the_others_checkpoints(runs: dict[str, TrinityRun], tmp_path: Path) -> None:
    for run in runs.values():
        run.start()
    for name, victim in (("ann", "explorer"), ("bob", "trainer")):
        kill_process(runs[name].until(lambda status: (status["step"] or 0) >= 3, 500, "three steps"), victim)
    for run in runs.values():
        assert run.finish(600) == 0, run.tail()

    for name, run in runs.items():
        groups = list(read_experiences(str(tmp_path / f"{name}.jsonl"), "experience_buffer"))
        assert len({group.task.task_id for group in groups}) == len(groups) == STEPS * PILES
        opponents = set()
        for group in groups:
            for one in group.experiences:
                info = json.loads(one.info_json)
                others = set(info["seats"].values()) - {"policy"}
                opponents |= others
                assert info["seats"][info["player"]] == "policy"
                assert bool(others) == (group.task.taskset == "rival") == ("score" in one.metrics)
        assert opponents <= {f"rival {step}" for step in range(0, STEPS + 1, SAVED)}
        loaded = [event for event in events(run.job) if event["event"] == "explorer.checkpoint.loaded"]
        assert loaded and {Path(event["folder"]).name for event in loaded} == {"ann", "bob"} - {name}


def events(job: Path) -> Iterator[dict[str, Any]]:
    for file in job.rglob("log/explorer*.log"):
        yield from map(json.loads, file.read_text().splitlines())
