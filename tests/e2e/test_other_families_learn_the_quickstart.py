"""The quickstart learns with experts, delta networks and windows, on real vLLM and DeepSpeed, as Qwen2 does.

Two of the models have towers for images, which stay as they were made.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from support.programs.run import TrinityRun, write_config

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 24
VERIFIED = "sync.version.verified"
TOWERS = ("visual", "vision_tower", "multi_modal_projector")


# Steps of SFT leave room to learn by GRPO: after 200, Qwen3.5 has 0.8.
@pytest.mark.parametrize(
    ("family", "sft_steps", "replay"),
    [("qwen3_5", 100, False), ("gemma3", 200, False), ("qwen3_moe", 200, False), ("qwen3_moe", 200, True)],
)
def test_the_quickstart_learns(
    family: str,
    sft_steps: int,
    replay: bool,
    repository: Path,
    quickstart_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quickstart, model = repository / "examples/quickstart", tmp_path / "model"
    monkeypatch.setattr(sys, "argv", ["make_model.py", str(model), "--family", family])
    runpy.run_path(str(quickstart / "make_model.py"), run_name="__main__")
    changes = {
        "algorithm": {"enable_router_replay": replay},
        "buffer": {"total_steps": STEPS},
        "explorer": {"eval_interval": STEPS},
        "stages": {0: {"buffer": {"total_steps": sft_steps, "train_batch_size": 64}}},
    }
    config = write_config(quickstart / "arithmetic.yaml", tmp_path / "run.yaml", changes)
    run = TrinityRun(config, tmp_path, TRINITY_MODEL_PATH=str(model), TRINITY_TASKSET_PATH=str(quickstart_data))
    try:
        run.start()
        assert run.finish(1400) == 0, run.tail()
    finally:
        run.end()
    summary = json.loads((run.job / "summary.json").read_text())
    print(f"{family}: accuracy {summary['eval_before']:.3f} -> {summary['eval_after']:.3f}, "
          f"{summary['wall_seconds']:.0f} s of GRPO")  # fmt: skip
    assert summary["eval_after"] >= summary["eval_before"] + 0.2
    log = (run.job / "rft/log/sync.log").read_text().splitlines()
    verified = {line["version"]: line["error"] for line in map(json.loads, log) if line["event"] == VERIFIED}
    assert sorted(verified) == list(range(STEPS + 1)), "an explorer has computed the canary of every version"
    steps = [json.loads(line) for line in (run.job / "rft/monitor/trainer.jsonl").read_text().splitlines()]
    assert [step.get("actor/router_replayed") for step in steps if "actor/grad_norm" in step] == [
        1.0 if replay else None
    ] * STEPS
    assert_towers_are_equal(model, run.job / f"rft/global_step_{STEPS}/actor/huggingface")


def assert_towers_are_equal(model: Path, trained: Path) -> None:
    """Compares the checkpoint with the model, as transformers loads both: towers are equal, all else has changed."""
    config = AutoConfig.from_pretrained(model)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    before, after = (kind.from_pretrained(folder).state_dict() for folder in (model, trained))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        is_of_tower = any(part in name for part in TOWERS)
        assert torch.equal(tensor, after[name]) is is_of_tower, name
