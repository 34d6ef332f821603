"""The quickstart's self-distillation, a few steps: a trainer that dies learns the same again from the log.

Processes are forked, and transformers samples and teaches where vLLM would (support/programs/forked_run.py).
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.programs.forked_run import ForkedRun
from support.programs.run import kill_process, process_of, write_config

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, KILLED_AFTER = 6, 2


@pytest.fixture
def data(repository: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for script in (
        ["quickstart/make_data.py", str(folder), "--test-size", "4"],
        ["algorithms/make.py", "--data", str(folder)],
    ):
        command = [sys.executable, str(repository / "examples" / script[0]), *script[1:]]
        subprocess.run(command, check=True, timeout=60, capture_output=True)
    return folder


def steps_of(run: ForkedRun) -> dict[int, dict[str, Any]]:
    """Metrics of each step; of a step trained twice, the last."""
    lines = (run.job / "monitor/trainer.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines) if "actor/distill_loss" in line}


def test_a_trainer_that_dies_learns_the_same_again(
    repository: Path, quickstart_model: Path, data: Path, tmp_path: Path
) -> None:
    changes = {
        "algorithm": {"repeat_times": 2},
        "buffer": {"batch_size": 4, "total_steps": STEPS},
        "explorer": {"eval_interval": STEPS},
        "trainer": {"save_interval": STEPS},  # it begins anew
    }
    config = write_config(repository / "examples/quickstart/self_distillation.yaml", tmp_path / "run.yaml", changes)
    variables = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(data)}
    run = ForkedRun(config, tmp_path, OMP_NUM_THREADS="1", **variables)
    try:
        run.start()
        status = run.until(lambda s: (s["step"] or 0) >= KILLED_AFTER, 150, "some steps")
        kill_process(status, "trainer")
        before = steps_of(run)
        run.until(lambda s: process_of(s, "trainer")["restarts"] == 1, 60, "the trainer is back")
        assert run.finish(250) == 0, run.tail()
    finally:
        run.end()
    after = steps_of(run)
    assert sorted(after) == list(range(1, STEPS + 1))
    assert len(before) >= KILLED_AFTER
    for step, metrics in before.items():
        for name in ("actor/distill_loss", "actor/teacher_top_mass", "actor/grad_norm"):
            assert after[step][name] == pytest.approx(metrics[name], rel=1e-5), (step, name)
    kept = (run.job / "monitor/batches.jsonl").read_text().splitlines()
    groups = {(line["step"], tuple(line["groups"])) for line in map(json.loads, kept)}
    assert len(groups) == STEPS, "the same groups each time"
    summary = json.loads((run.job / "summary.json").read_text())
    assert None not in (summary["eval_before"], summary["eval_after"]), "evaluations ask no teacher"
