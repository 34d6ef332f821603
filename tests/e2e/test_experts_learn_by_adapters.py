"""The quickstart's GRPO by LoRA on attention and experts of a tiny Qwen3-MoE, on real vLLM and DeepSpeed."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from support.programs.run import TrinityRun, write_config
from trinity.weights.adapters import read_adapters

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 24
LORA = {"lora_rank": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]}


def finished(repository: Path, folder: Path, model: Path, data: Path, changes: dict[str, Any]) -> Path:
    """Runs the quickstart with these changes to its end; returns the job folder."""
    folder.mkdir()
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", folder / "run.yaml", changes)
    run = TrinityRun(config, folder, TRINITY_MODEL_PATH=str(model), TRINITY_TASKSET_PATH=str(data))
    try:
        run.start()
        assert run.finish(700) == 0, run.tail()
    finally:
        run.end()
    return run.job


def test_a_mixture_learns_by_adapters_of_its_experts(
    repository: Path, quickstart_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SFT trains the whole model first, since a random model has nothing to adapt."""
    quickstart = repository / "examples/quickstart"
    monkeypatch.setattr(sys, "argv", ["make_model.py", str(tmp_path / "model"), "--family", "qwen3_moe"])
    runpy.run_path(str(quickstart / "make_model.py"), run_name="__main__")
    sft = yaml.safe_load((quickstart / "arithmetic.yaml").read_text())["stages"][0]
    sft["buffer"] |= {"total_steps": 200, "train_batch_size": 64}
    warm = finished(repository, tmp_path / "warm", tmp_path / "model", quickstart_data, {"stages": [sft]})
    model = warm / "sft/global_step_200/actor/huggingface"
    job = finished(repository, tmp_path / "run", model, quickstart_data, {
        "stages": [],
        "model": {"lora_configs": [LORA]},
        "algorithm": {"optimizer": {"lr": 2e-3}},
        "buffer": {"total_steps": STEPS},
        "explorer": {"eval_interval": STEPS},
    })  # fmt: skip
    summary = json.loads((job / "summary.json").read_text())
    before, after, seconds = (summary[name] for name in ("eval_before", "eval_after", "wall_seconds"))
    print(f"accuracy {before:.3f} -> {after:.3f}, {seconds:.0f} s of GRPO")
    assert after >= before + 0.2
    log = [json.loads(line) for line in (job / "log/sync.log").read_text().splitlines()]
    verified = {line["version"]: line["error"] for line in log if line["event"] == "sync.version.verified"}
    assert sorted(verified) == list(range(STEPS + 1)), "an explorer has computed the canary of every version"
    checkpoint = job / f"global_step_{STEPS}/actor"
    given = read_adapters(checkpoint / "lora_adapter")
    assert sum(name.endswith("_proj") and ".experts." in name for name in given.modules) == 2 * 4  # layers
    old, new = (load_file(folder / "model.safetensors") for folder in (model, checkpoint / "huggingface"))
    assert old.keys() == new.keys()
    assert sum(".experts." in name for name in old) == 4 * 8 * 3
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    adapted = tuple(f"{name}_proj.weight" for name in "qkvo")
    assert changed == {name for name in old if ".experts." in name or name.endswith(adapted)}
