"""A run's only provider is away in its middle, longer than any wait: no dead letter, no attempt, and the run ends well.

TRINITY_TEST_AWAY_SECONDS says how long, 25 s unless it is set. Then explorer.environment_wait (1 s here) is over many
times, and before, each task had used up its attempts. Processes are forked, and transformers samples where vLLM would
(support/programs/forked_run.py).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs.forked_run import ForkedRun
from support.programs.run import write_config
from trinity.runtime.process import free_port

AWAY_SECONDS = float(os.environ.get("TRINITY_TEST_AWAY_SECONDS", "25"))
STEPS = 4
TOKEN = "example"

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400 + AWAY_SECONDS)]


@pytest.fixture
def run(repository: Path, quickstart_model: Path, tmp_path: Path) -> Iterator[ForkedRun]:
    example = repository / "examples/custom_environment"
    small = {
        "model": {"model_path": str(quickstart_model), "max_model_len": 512, "max_response_tokens": 12},
        "algorithm": {"repeat_times": 2},
        "buffer": {
            "batch_size": 4,
            "total_steps": STEPS,
            "explorer_input": {"taskset": {"path": str(example / "data"), "workflow_args": {"max_turns": 2}}},
        },
        "explorer": {"environment_wait": 1, "max_retry_times": 1, "runner_per_model": 2},
    }
    config = write_config(example / "guess.yaml", tmp_path / "guess.yaml", small)
    address = f"127.0.0.1:{free_port()}"
    started = ForkedRun(config, tmp_path, TRINITY_ENVIRONMENT_ATTACH_TOKEN=TOKEN, TRINITY_ENVIRONMENT_LISTEN=address)
    yield started
    started.end()


def attach(repository: Path, run: ForkedRun, folder: Path) -> "subprocess.Popen[bytes]":
    script, address = repository / "examples/custom_environment/guess.py", run.environment["TRINITY_ENVIRONMENT_LISTEN"]
    with (folder / "provider.out").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, str(script), "attach", address, "only"],
            env={**os.environ, "TRINITY_ENVIRONMENT_ATTACH_TOKEN": TOKEN},
            stdout=out,
            stderr=out,
        )


def test_the_run_waits_and_ends_well(run: ForkedRun, repository: Path, tmp_path: Path) -> None:
    run.start()
    provider = attach(repository, run, tmp_path)
    try:
        run.until(lambda status: (status["step"] or 0) >= 1, 200, "the first step")
        provider.kill()
        provider.wait(10)
        gone = time.monotonic()
        status = run.until(
            lambda status: [one["health"] for one in status["providers"]] == ["away"], 20, "the provider is away"
        )
        step = status["step"] if status else 0
        time.sleep(max(0.0, AWAY_SECONDS - (time.monotonic() - gone)))
        status = run.status()
        assert [one["health"] for one in status["providers"]] == ["away"]
        assert time.time() - status["providers"][0]["since_seconds"] > AWAY_SECONDS - 15
        assert status["step"] < STEPS, step
        assert (status["groups"]["dead_letters"], status["groups"]["failed_attempts"]) == (0, 0)
        provider = attach(repository, run, tmp_path)
        assert run.finish(150) == 0, run.tail()
    finally:
        provider.kill()
        provider.wait(10)
    trained = [json.loads(line)["step"] for line in (run.job / "monitor/trainer.jsonl").read_text().splitlines()]
    assert trained == list(range(1, STEPS + 1))
    summary = json.loads((run.job / "summary.json").read_text())
    assert (summary["dead_letters"], summary["failed_attempts"]) == (0, 0)
    assert summary["groups_fed"] == summary["groups_stored"] + summary["outstanding"]
