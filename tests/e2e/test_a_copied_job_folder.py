"""A copy of a finished run's job folder, below another root, is read and resumed after the original was deleted.

Processes are forked, and transformers samples where vLLM would (support/programs/forked_run.py).
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs.forked_run import ForkedRun, trinity
from support.programs.run import write_config

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3


@pytest.fixture
def run(repository: Path, quickstart_model: Path, tmp_path: Path) -> Iterator[ForkedRun]:
    data = tmp_path / "data"
    make_data = [sys.executable, str(repository / "examples/quickstart/make_data.py"), str(data), "--test-size", "4"]
    subprocess.run(make_data, check=True, timeout=60, capture_output=True)
    short = {
        "stages": [],
        "buffer": {"batch_size": 4, "total_steps": STEPS, "explorer_input": {"eval_tasksets": []}},
        "trainer": {"save_interval": 1, "save_hf_checkpoint": "last"},
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", tmp_path / "run.yaml", short)
    environment = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(data)}
    started = ForkedRun(config, tmp_path, **environment)
    yield started
    started.end()


def test_it_is_read_and_resumed_without_the_original(run: ForkedRun, tmp_path: Path) -> None:
    run.start()
    assert run.finish(300) == 0, run.tail()
    before = {path.name for path in (run.job / "weights").glob("v*")}
    assert f"v{STEPS}" in before
    root = tmp_path / "elsewhere" / "copies"
    shutil.copytree(run.folder / "jobs", root)
    shutil.rmtree(run.folder / "jobs")
    job = root / run.job.relative_to(run.folder / "jobs")
    moved = {**run.environment, "TRINITY_CHECKPOINT_ROOT_DIR": str(root)}

    def shown(*arguments: str) -> str:
        done = trinity(arguments, moved, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for by in (("--job", str(job)), ("--config", str(run.config))):
        assert json.loads(shown("status", *by, "--json"))["state"] == "finished"
        assert "reward" in shown("view", *by, "--limit", "2")
    assert json.loads(shown("batch", "show", str(STEPS), "--job", str(job), "--json"))
    model = job / f"global_step_{STEPS - 1}/actor/huggingface/model.safetensors"
    assert not model.exists()
    shown("convert", "--checkpoint-dir", str(job), "--steps", str(STEPS - 1))
    assert model.exists()

    again = ForkedRun(run.config, run.folder, **{**moved})
    again.job, again.environment = job, moved
    try:
        again.start(f"buffer.total_steps={STEPS + 2}")
        again.until(lambda s: s["weights"] and (s["weights"]["live"] or 0) >= STEPS, 200, "a LIVE version")
        assert again.finish(300) == 0, again.tail()
    finally:
        again.end()
    assert json.loads((job / "summary.json").read_text())["steps"] == STEPS + 2
    log = (job / "log" / "explorer.log").read_text()
    assert str(run.job) not in (job / "log" / "sync.log").read_text()
    assert "weights.fetch.failed" not in log
    assert not run.job.exists()
