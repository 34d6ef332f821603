"""`trinity cost`: the seconds by fate are those of the clock times the devices, with kills; a budget ends a run.

Processes are forked, and transformers samples where vLLM would (support/programs/forked_run.py).
"""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.programs.forked_run import ForkedRun, trinity
from support.programs.run import Status, kill_process, process_of, write_config
from trinity.cli.supervise.stage.stage import EXIT_SPENT
from trinity.reading.accounts.device_log import DeviceLog
from trinity.weights.checkpoints import complete_steps

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS, DEVICES = 6, 2  # an engine and a rank
NOTHING_SAVED = 1000


@pytest.fixture
def run(repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path) -> Iterator[ForkedRun]:
    short = {
        "stages": [],
        "buffer": {"batch_size": 4, "total_steps": STEPS, "explorer_input": {"eval_tasksets": []}},
        "trainer": {"save_interval": NOTHING_SAVED},
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", tmp_path / "arithmetic.yaml", short)
    paths = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(quickstart_data)}
    found = ForkedRun(config, tmp_path, **paths)
    yield found
    found.end()


def test_they_are_those_of_the_clock_with_kills(run: ForkedRun) -> None:
    run.start()
    started = run.until(lambda status: "buffer" in _pids(status), 100, "a buffer")
    began = _begin_of(_pids(started)["buffer"])  # the first process of the stage
    # Steps without a checkpoint are trained again by the next trainer.
    kill_process(run.until(lambda status: (status["step"] or 0) >= 3, 200, "step 3"), "trainer")
    again = run.until(lambda status: process_of(status, "trainer")["restarts"] == 1, 60, "a trainer again")
    kill_process(again, "explorer")
    both = run.until(lambda status: process_of(status, "explorer")["restarts"] == 1, 60, "an explorer again")
    pids = [pid for name, pid in _pids(both).items() if name != "nats"]
    deadline = time.monotonic() + 300
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    seconds = time.time() - began
    assert run.finish(60) == 0, run.tail()

    done = trinity(["cost", "--config", str(run.config), "--json"], run.environment, run.folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == 2
    assert sum(found["fates"].values()) == pytest.approx(DEVICES * seconds, rel=0.01), found
    assert found["gpu_seconds"] == pytest.approx(DEVICES * seconds, rel=0.01)
    assert {"trained", "recomputed", "aborted", "starting", "idle", "restarting"} <= found["fates"].keys()
    trained = [group for group in found["groups"] if group["fate"] == "trained"]
    assert len(trained) == STEPS * 4
    assert all(group["seconds"] > 0 for group in trained)


def test_a_budget_ends_the_run_with_a_checkpoint_and_says_why(run: ForkedRun) -> None:
    run.start("buffer.total_steps=100000", "budget.gpu_hours=1")
    run.until(lambda status: (status["step"] or 0) >= 1, 200, "the first step")
    other = DeviceLog(run.job, "explorer-other")  # an explorer that joined has had 4,000 devices for some seconds
    other.begin("other", "explorer", 4000)
    time.sleep(1.0)
    other.end()
    assert run.finish(200) == EXIT_SPENT, run.tail()
    said = re.search(r"budget.gpu_hours: (\S+) hours of devices are spent, and 1 is the limit", run.tail())
    assert said and float(said[1]) >= 1, run.tail()
    saved = re.search(r"a checkpoint of step (\d+) is saved", run.tail())
    assert saved, run.tail()
    assert complete_steps(run.job)[-1] == int(saved[1])
    assert not run.left_alive(10)
    run.start("budget.gpu_hours=1")
    assert run.finish(100) == EXIT_SPENT, run.tail()


def _begin_of(pid: int) -> float:
    """Unix time. psutil counts from the boot, which the kernel gives in whole seconds."""
    now = time.time()
    with subprocess.Popen(["sleep", "60"]) as child:
        off = now - psutil.Process(child.pid).create_time()
        child.kill()
    return psutil.Process(pid).create_time() + off


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _pids(status: Status) -> dict[str, int]:
    return {one["name"]: one["pid"] for one in status["processes"]}
