"""Algorithms that need more than groups and rewards, three steps each from their YAML in examples/algorithms.

The others differ from these in pure functions; benchmarks/algorithms.py runs them all. Processes are
forked, and transformers samples where vLLM would (support/programs/forked_run.py).
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.programs.forked_run import ForkedRun
from support.programs.run import write_config

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, GROUPS, GROUP = 3, 2, 4
SHOWN = {
    "ppo": ["actor/pg_loss", "critic/value_loss", "critic/grad_norm", "actor/mismatch/"],
    "on_policy_distill": ["actor/pg_loss", "actor/mismatch/kernel_ratio"],
    "top_k_distill": ["actor/distill_loss", "actor/teacher_top_mass"],
    "mix": ["actor/pg_loss", "actor/kl_loss"],
    "dpo": ["actor/dpo_loss", "actor/dpo_accuracy", "actor/dpo_margin"],
    "cpt": ["actor/sft_loss"],
}


@pytest.fixture(scope="module")
def data(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("algorithms") / "data"
    for script in (["quickstart/make_data.py", str(folder)], ["algorithms/make.py", "--data", str(folder)]):
        command = [sys.executable, str(repository / "examples" / script[0]), *script[1:]]
        subprocess.run(command, check=True, timeout=60, capture_output=True)
    return folder


@pytest.mark.parametrize("name", SHOWN)
def test_it_runs_from_its_yaml(name: str, repository: Path, quickstart_model: Path, data: Path, tmp_path: Path) -> None:
    size: dict[str, Any] = {"total_steps": STEPS, "batch_size": GROUPS}
    size |= {"mix": {"train_batch_size": GROUPS * GROUP * 5 // 4}}.get(name, {})
    changes: dict[str, Any] = {"buffer": size, "trainer": {"mini_batch_size": 4, "save_interval": 2}}
    if name in ("dpo", "cpt"):
        size |= {"train_batch_size": 8}
    else:
        changes["algorithm"] = {"repeat_times": GROUP}
    config = write_config(repository / f"examples/algorithms/{name}.yaml", tmp_path / f"{name}.yaml", changes)
    variables = ("TRINITY_MODEL_PATH", "TRINITY_TEACHER_PATH")
    environment = {variable: str(quickstart_model) for variable in variables}
    run = ForkedRun(config, tmp_path, TRINITY_TASKSET_PATH=str(data), OMP_NUM_THREADS="1", **environment)
    try:
        run.start()
        assert run.finish(200) == 0, run.tail()
    finally:
        run.end()
    job = tmp_path / "jobs/algorithms" / name
    steps = [json.loads(line) for line in (job / "monitor/trainer.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert all(math.isfinite(value) for value in step.values() if isinstance(value, float)), step
    names = {key for step in steps for key in step}
    assert all(any(found.startswith(key) for found in names) for key in SHOWN[name]), names
    assert steps[-1]["actor/updates"] >= 2
    assert name != "mix" or all(step["actor/sft_loss"] > 0 for step in steps), "expert rows are part of every batch"
    assert (job / f"global_step_{STEPS}/actor/huggingface/model.safetensors").is_file()
    assert (job / f"global_step_{STEPS}/critic").is_dir() == (name == "ppo")
