"""The quickstart with adapters that engines hold unmerged: every version passes its canary, and names its tokens.

On real vLLM and DeepSpeed. That unmerged adapters compute what merged ones do is shown in
services/explorer/tests/engine/test_unmerged_adapters.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs.run import TrinityRun, kill_process, write_config

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 6
LORA = {"lora_rank": 8, "lora_alpha": 16, "merged": False}


def test_the_quickstart_runs_with_unmerged_adapters(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path
) -> None:
    """The explorer is killed in the middle: engines that start then get the base model and the newest adapter."""
    changes = {
        "model": {"lora_configs": [LORA]},
        "algorithm": {"entropy_loss_fn_args": {"entropy_coef": 0.1}, "optimizer": {"lr": 1e-3}},
        "buffer": {"batch_size": 4, "total_steps": STEPS},
        "explorer": {"eval_on_startup": False, "eval_interval": 1000},
        "synchronizer": {"sync_offset": 0},  # each step trains on its own weights' experience
        "stages": [],
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", tmp_path / "run.yaml", changes)
    given = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(quickstart_data)}
    run = TrinityRun(config, tmp_path, **given)
    try:
        run.start()
        seen = run.until(lambda status: (status["step"] or 0) >= 2, 400, "two steps")
        kill_process(seen, "explorer")
        assert run.finish(400) == 0, run.tail()
    finally:
        run.end()

    events = [json.loads(line) for file in run.job.rglob("log/*.log") for line in file.read_text().splitlines()]
    verified = {event["version"]: event["error"] for event in events if event["event"] == "sync.version.verified"}
    assert sorted(verified) == list(range(STEPS + 1)), "an explorer has computed the canary of every version"
    assert "explorer.canary.failed" not in {event["event"] for event in events}
    loaded = [event for event in events if event["event"] == "explorer.weights.loaded"]
    assert {event["transport"] for event in loaded} == {"folder"}
    assert set(range(1, STEPS)) <= {event["version"] for event in loaded}
    print("swaps", sorted(event["pause"] for event in loaded))

    trinity = str(Path(sys.executable).with_name("trinity"))
    seen_in = set()
    for step in (2, STEPS):
        shown = subprocess.run(
            [trinity, "view", "--job", str(run.job), "--step", str(step), "--json"],
            capture_output=True, text=True, timeout=120, env={**os.environ, **given},
        )  # fmt: skip
        versions = [row["versions"] for row in json.loads(shown.stdout)]
        assert versions and all(len(of_row) == 1 for of_row in versions), "a response is of one version"
        seen_in |= {version for [[version, _, _]] in versions}
    assert seen_in == {1, STEPS - 1}
    steps = [json.loads(line) for line in (run.job / "monitor/trainer.jsonl").read_text().splitlines()]
    gaps = [step[name] for step in steps for name in step if "logprob_diff" in name]
    assert gaps and max(gaps) < 1e-4, "the trainer computes what the engine sampled with"
