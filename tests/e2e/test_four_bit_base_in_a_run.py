"""Runs that train adapters on a base of four bits, with vLLM: trainer and engine compute with the same base.

The trainer is killed in the middle. Explorers compute each version's canary, and the trainer compares the engine's
log-probabilities of every sampled token with its own: rounded and original matrices differ 1000 times as much.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.programs.run import TrinityRun, kill_process, write_config
from trinity.config.checks.lora import in_four_bits
from trinity.weights.four_bit import rounded_base

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("bitsandbytes")

STEPS = 4


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "unmerged"])
def test_the_quickstart_runs_on_a_base_of_four_bits(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path, merged: bool
) -> None:
    changes = {
        "model": {"lora_configs": [{"lora_rank": 8, "lora_alpha": 16, "load_in_4bit": True, "merged": merged}]},
        "algorithm": {"kl_loss_fn": "k2", "entropy_loss_fn_args": {"entropy_coef": 0.1}, "optimizer": {"lr": 1e-3}},
        "buffer": {"batch_size": 4, "total_steps": STEPS},
        "explorer": {"eval_on_startup": False, "eval_interval": 1000},
        "synchronizer": {"sync_offset": 0},  # each step trains on its own weights' experience
        "trainer": {"save_interval": 2, "max_checkpoints_to_keep": None},
        "stages": [],
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", tmp_path / "run.yaml", changes)
    given = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(quickstart_data)}
    run = TrinityRun(config, tmp_path, **given)
    try:
        run.start()
        kill_process(run.until(lambda status: (status["step"] or 0) >= 2, 400, "two steps"), "trainer")
        assert run.finish(400) == 0, run.tail()
    finally:
        run.end()

    events = [json.loads(line) for file in run.job.rglob("log/*.log") for line in file.read_text().splitlines()]
    verified = {event["version"]: event["error"] for event in events if event["event"] == "sync.version.verified"}
    assert sorted(verified) == list(range(STEPS + 1)), "an explorer has computed the canary of every version"
    assert "explorer.canary.failed" not in {event["event"] for event in events}
    steps = [json.loads(line) for line in (run.job / "monitor/trainer.jsonl").read_text().splitlines()]
    gaps = [step[name] for step in steps for name in step if "logprob_diff" in name]
    print("canaries", verified, "gaps", gaps)
    assert gaps and max(gaps) < 1e-4, "the trainer computes what the engine sampled with"

    last = run.job / f"global_step_{STEPS}/actor"
    whole = load_file(last / "huggingface/model.safetensors")
    original = load_file(quickstart_model / "model.safetensors")
    base = dict(rounded_base(original.items(), in_four_bits, torch.float32))
    held = [name for name, tensor in original.items() if in_four_bits(name, tuple(tensor.shape))]
    assert held and all(torch.linalg.matrix_rank(whole[name] - base[name], rtol=1e-3) <= 8 for name in held)
    assert all(torch.equal(whole[name], tensor) for name, tensor in original.items() if name not in held)

    converted = run.job / "global_step_2"
    trinity = str(Path(sys.executable).with_name("trinity"))
    subprocess.run([trinity, "convert", "-c", str(converted)], check=True, timeout=120, capture_output=True)
    found = load_file(converted / "actor/huggingface/model.safetensors")
    assert all(torch.linalg.matrix_rank(found[name] - base[name], rtol=1e-3) <= 8 for name in held)
