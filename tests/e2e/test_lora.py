"""A run that begins with adapters of peft: versions of some KiB that explorers merge, from version 0 on, the trainer
killed, a model at the end.

Processes are forked, and transformers samples where vLLM would (support/programs/forked_run.py): that vLLM computes
what merged adapters compute is shown in tests/integration/test_trainer_and_engine_agree.py.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.programs.forked_run import ForkedRun
from support.programs.run import kill_process, write_config

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 5
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


@dataclass
class Journey:
    code: int
    transports: dict[int, str]
    log: list[dict[str, Any]]
    run: ForkedRun
    model: Path
    given: dict[str, torch.Tensor]


def make_adapters(model: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Adapters that change what the model computes."""
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = LoraConfig(r=LORA["lora_rank"], lora_alpha=LORA["lora_alpha"], target_modules=LORA["target_modules"])
    policy = get_peft_model(base, settings)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02)
    policy.save_pretrained(folder)
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def journey(repository: Path, quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Journey]:
    """The quickstart without its SFT stage; the entropy term has a gradient where all rewards are the same."""
    folder = tmp_path_factory.mktemp("lora")
    make_data = [sys.executable, str(repository / "examples/quickstart/make_data.py"), str(folder / "data")]
    subprocess.run([*make_data, "--test-size", "32"], check=True, timeout=60, capture_output=True)
    given = make_adapters(quickstart_model, folder / "given")
    changes = {
        "model": {"lora_configs": [{"path": str(folder / "given"), "lora_rank": LORA["lora_rank"]}]},
        "algorithm": {"kl_loss_fn": "k2", "entropy_loss_fn_args": {"entropy_coef": 0.1}, "optimizer": {"lr": 1e-3}},
        "buffer": {"batch_size": 4, "total_steps": STEPS},
        "explorer": {"eval_on_startup": False, "eval_interval": 1000},
        "trainer": {"save_interval": 2, "max_checkpoints_to_keep": None},
        "stages": [],
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", folder / "run.yaml", changes)
    environment = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(folder / "data")}
    run = ForkedRun(config, folder, **environment)
    try:
        run.start()
        seen = run.until(lambda s: (s["step"] or 0) > 2, 200, "a step after a checkpoint")
        kill_process(seen, "trainer")
        code = run.finish(240)
        files = sorted(run.job.rglob("explorer*.log"))
        explorer = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        loaded = {e["version"]: e["transport"] for e in explorer if e["event"] == "explorer.weights.loaded"}
        log = [json.loads(line) for line in next(run.job.rglob("trainer.log")).read_text().splitlines()]
        yield Journey(code, loaded, log + explorer, run, quickstart_model, given)
    finally:
        run.end()


def test_the_run_ends_well_and_every_version_is_loaded_and_computes_its_canary(journey: Journey) -> None:
    events = [event["event"] for event in journey.log]
    assert journey.code == 0, journey.run.tail()
    assert events.count("trainer.resumed") == 1
    assert "explorer.canary.failed" not in events
    assert "trainer.version.rejected" not in events
    assert set(range(STEPS)) <= journey.transports.keys()
    assert set(journey.transports.values()) <= {"folder", "collective-gloo"}


def test_a_version_is_some_kib(journey: Journey) -> None:
    published = {e["version"]: e["size_bytes"] for e in journey.log if e["event"] == "trainer.version.published"}
    whole = (journey.model / "model.safetensors").stat().st_size
    assert len(set(range(STEPS + 1)) - published.keys()) <= 1, "but the one after whose publication the trainer died"
    print(f"{max(published.values())} bytes a version, {whole} the model")
    assert max(published.values()) < 64 * 1024 < whole / 10


def test_version_0_is_the_given_adapters(journey: Journey) -> None:
    found = load_file(next(journey.run.job.rglob("weights/v0/*.safetensors")))
    assert found.keys() == journey.given.keys()
    assert all(torch.equal(tensor, journey.given[name]) for name, tensor in found.items())


def test_checkpoints_have_the_adapters_and_the_last_one_a_whole_model(journey: Journey) -> None:
    first, last = (journey.run.job / f"global_step_{step}/actor" for step in (2, STEPS))
    adapters = [load_file(folder / "lora_adapter/adapter_model.safetensors") for folder in (first, last)]
    assert adapters[0].keys() == adapters[1].keys()
    assert any(not torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert not (first / "huggingface/model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(journey.model, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, last / "lora_adapter").merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(last / "huggingface", dtype=torch.float32).state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
