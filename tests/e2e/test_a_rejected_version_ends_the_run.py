"""`trinity run` ends as soon as a service says that starting it again would not help, and shows why."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fakes.explorers.torch_engine import ComputesSomethingElse
from support.programs.forked_run import ForkedRun
from support.programs.run import write_config

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(480)]


@pytest.fixture
def run(repository: Path, quickstart_model: Path, tmp_path: Path) -> Iterator[ForkedRun]:
    """The quickstart without its SFT stage; its explorer does not agree as closely as this canary wants it to."""
    make_data = [sys.executable, str(repository / "examples/quickstart/make_data.py"), str(tmp_path / "data")]
    subprocess.run([*make_data, "--test-size", "32"], check=True, timeout=60, capture_output=True)
    changes = {
        "buffer": {"batch_size": 4, "total_steps": 2},
        "explorer": {"eval_on_startup": False},
        "synchronizer": {"canary_tolerance": 1e-5},
        "stages": [],
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", tmp_path / "run.yaml", changes)
    environment = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(tmp_path / "data")}
    started = ForkedRun(config, tmp_path, ComputesSomethingElse, **environment)
    yield started
    started.end()


def test_a_version_that_fails_its_canary_ends_the_run_at_once_with_both_numbers(run: ForkedRun) -> None:
    run.start()
    assert run.finish(360) == 1
    shown = run.tail()
    assert (
        "trainer cannot continue: version 0 was rejected: canary: the trainer expected a log-probability of -" in shown
    )
    assert "computed -" in shown
    assert "synchronizer.canary_tolerance" in shown
    log = next(run.job.rglob("trainer.log"))
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events.count("service.started") == 1
    assert not run.left_alive(10)
