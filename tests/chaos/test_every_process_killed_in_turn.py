"""One GRPO run on real parts; every process of it is killed with -9 once, `trinity run` itself included.

I1 to I4: nothing acknowledged is lost, no group is trained twice, step k stays the same batch, the counts add up.
"""

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.run import Status, TrinityRun, kill_process, write_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, GROUPS = 30, 8
VICTIMS = ["buffer", "nats", "sync", "environment", "explorer"]


@pytest.fixture(scope="module")
def story(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("chaos")
    changes = {
        "name": "chaos",
        "buffer": {"batch_size": GROUPS, "total_steps": STEPS, "explorer_input": {"eval_tasksets": []}},
        "algorithm": {"repeat_times": 4},
        "trainer": {"save_interval": 3, "max_checkpoints_to_keep": 3},
        "stages": [],
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", folder / "chaos.yaml", changes)
    environment = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(quickstart_data)}
    run = TrinityRun(config, folder, **environment)
    try:
        yield _tell(run)
    finally:
        run.end()


def _tell(run: TrinityRun) -> dict[str, Any]:
    job = run.job
    rng = random.Random(11)
    run.start()
    run.until(lambda s: (s["step"] or 0) >= 2, 240, "step 2")
    for victim in VICTIMS:
        status = run.until(lambda s, v=victim: _is_up(s, v), 120, f"{victim} is up")
        time.sleep(rng.uniform(0.0, 1.0))
        kill_process(status, victim)
        run.until(lambda s, v=victim: _restarts(s, v) == 1 and _is_up(s, v), 120, f"{victim} is back")
    before = _trained(job)

    run.signal(signal.SIGTERM)
    begin = time.monotonic()
    code_of_sigterm = run.finish(30)
    seconds_of_sigterm = time.monotonic() - begin
    left_by_sigterm = run.left_alive(1)
    said = run.tail(1)

    run.start()
    run.until(lambda s: (s["step"] or 0) > max(before), 240, "it goes on after SIGTERM")
    run.kill()
    left_by_kill = run.left_alive(10)
    run.start()
    code = run.finish(300)
    return {
        "before": before,
        "after": _trained(job),
        "code_of_sigterm": code_of_sigterm,
        "seconds_of_sigterm": seconds_of_sigterm,
        "left_by_sigterm": left_by_sigterm,
        "said": said,
        "left_by_kill": left_by_kill,
        "code": code,
        "summary": json.loads((job / "summary.json").read_text()),
        "run": run,
    }


def _is_up(status: Status, name: str) -> bool:
    return any(p["name"] == name and p["health"] == "SERVING" for p in status["processes"])


def _restarts(status: Status, name: str) -> int:
    return next(int(p["restarts"]) for p in status["processes"] if p["name"] == name)


def _trained(job: Path) -> dict[int, list[int]]:
    lines = (job / "monitor/batches.jsonl").read_text().splitlines()
    return {entry["step"]: entry["groups"] for entry in map(json.loads, lines)}


def test_the_run_ends_well(story: dict[str, Any]) -> None:
    assert story["code"] == 0, story["run"].tail()


def test_the_counts_add_up(story: dict[str, Any]) -> None:
    summary = story["summary"]
    assert summary["groups_fed"] == summary["groups_stored"] + summary["dead_letters"] + summary["outstanding"]
    assert summary["groups_stored"] == STEPS * GROUPS


def test_every_group_is_trained_once_and_no_step_changed(story: dict[str, Any]) -> None:
    assert set(story["after"]) == set(range(1, STEPS + 1))
    used = [sequence for groups in story["after"].values() for sequence in groups]
    assert len(used) == len(set(used)) == STEPS * GROUPS
    for step, groups in story["before"].items():
        assert story["after"][step] == groups, f"step {step}"


def test_sigterm_ends_everything_within_ten_seconds(story: dict[str, Any]) -> None:
    assert story["code_of_sigterm"] == 128 + signal.SIGTERM
    assert story["seconds_of_sigterm"] < 10
    assert story["left_by_sigterm"] == []
    assert "SIGTERM" in story["said"]


def test_nothing_outlives_a_killed_supervisor(story: dict[str, Any]) -> None:
    assert not story["left_by_kill"], "\n".join(story["left_by_kill"])
