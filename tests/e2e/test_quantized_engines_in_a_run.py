"""A run whose engines quantize: its canaries pass, its losses weigh the difference, and its log names the precision."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs.run import TrinityRun, write_config
from trinity.weights.wire import decode_manifest

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(500)]

STEPS = 3
_INT8 = "int8_per_channel_weight_only"  # FP8 needs a GPU


def test_engines_in_eight_bits_sample_for_a_trainer_in_float32(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path
) -> None:
    changes = {
        "buffer": {"batch_size": 4, "total_steps": STEPS},
        "explorer": {
            "eval_on_startup": False,
            "rollout_model": {"dtype": "bfloat16", "engine_args": {"quantization": _INT8}},
        },
        "stages": [],
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", tmp_path / "run.yaml", changes)
    given = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(quickstart_data)}
    run = TrinityRun(config, tmp_path, **given)
    try:
        run.start()
        assert run.finish(400) == 0, run.tail()
    finally:
        run.end()
    manifests = [decode_manifest(path.read_bytes()) for path in (run.job / "weights").rglob("manifest.pb")]
    for canary in (manifest.canary for manifest in manifests if manifest.canary is not None):
        assert canary.allowed(_INT8) == (4 * canary.mean_tolerance, 4 * canary.max_tolerance)
    assert any(manifest.canary is not None for manifest in manifests)
    trained = [json.loads(line) for line in (run.job / "monitor/trainer.jsonl").read_text().splitlines()]
    trained = [step for step in trained if "actor/grad_norm" in step]
    assert len(trained) == STEPS
    assert all(0 < step[difference] < 0.2 for step in trained for difference in step if "logprob_diff" in difference)
    assert any("logprob_diff" in name for step in trained for name in step)
    assert "engines quantize, so token_cap is 2" in run.tail(400)
    trinity = str(Path(sys.executable).with_name("trinity"))
    seen = subprocess.run(
        [trinity, "view", "--job", str(run.job), "--json"],
        capture_output=True, text=True, timeout=120, env={**os.environ, **given},
    )  # fmt: skip
    rows = json.loads(seen.stdout)
    assert rows and all(row["precisions"] == [_INT8] for row in rows)
