"""A mixture of experts trains with replayed routes through the real explorer, buffer and trainer."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from support.programs.run import TrinityRun, write_config

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(800)]

STEPS = 4


def test_every_sampled_token_takes_the_engines_experts(
    repository: Path, quickstart_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickstart, model = repository / "examples/quickstart", tmp_path / "model"
    monkeypatch.setattr(sys, "argv", ["make_model.py", str(model), "--family", "qwen3_moe"])
    runpy.run_path(str(quickstart / "make_model.py"), run_name="__main__")
    changes = {
        "algorithm": {"enable_router_replay": True},
        "buffer": {"total_steps": STEPS},
        "explorer": {"eval_interval": STEPS},
        "stages": {0: {"buffer": {"total_steps": 60, "train_batch_size": 64}}},
    }
    config = write_config(quickstart / "arithmetic.yaml", tmp_path / "run.yaml", changes)
    run = TrinityRun(config, tmp_path, TRINITY_MODEL_PATH=str(model), TRINITY_TASKSET_PATH=str(quickstart_data))
    try:
        run.start()
        assert run.finish(700) == 0, run.tail()
    finally:
        run.end()
    steps = [json.loads(line) for line in (run.job / "rft/monitor/trainer.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "actor/router_replayed" in step]
    assert len(trained) == STEPS
    for step in trained:
        assert step["actor/router_replayed"] == 1
        assert step["actor/grad_norm"] > 0
