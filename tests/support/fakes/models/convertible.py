"""Checkpoints of a model as `trinity convert` takes them, and what it makes of them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from trinity.convert import convert
from trinity.reading.errors import ending_well


def converted(checkpoint_dir: Path, base_model_dir: Path | None, steps: str | None) -> int:
    """The exit code of `trinity convert`."""
    return ending_well(lambda: convert(checkpoint_dir, base_model_dir, steps))


def shaken(folder: Path) -> Path:
    """No two rows alike: fresh norms and biases are constant and would hide a wrong order."""
    torch.manual_seed(1)
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def plain_state(model: Path) -> dict[str, torch.Tensor]:
    return dict(Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict())


def step_folder(job: Path, step: int, model: Path | None) -> Path:
    """The empty actor folder of a step; with the model's config if one is given."""
    actor = job / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    if model:
        (actor / "huggingface").mkdir()
        shutil.copy(model / "config.json", actor / "huggingface")
    return actor


def plain_step(job: Path, step: int, model: Path, *, config: bool = True) -> Path:
    """A checkpoint of one FSDP rank."""
    actor = step_folder(job, step, model if config else None)
    torch.save(plain_state(model), actor / "model_world_size_1_rank_0.pt")
    return actor


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(24).reshape(2, 12) * 7 % 97
    with torch.no_grad():
        return model.float().eval()(input_ids=ids).logits


def assert_same_model(folder: Path, parameters: dict[str, torch.Tensor]) -> None:
    """`folder` computes what a model with these parameters computes, and holds each of them once."""
    expected = Qwen2ForCausalLM(Qwen2Config.from_pretrained(folder))
    missing, unexpected = expected.load_state_dict(parameters, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    expected.tie_weights()
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(found), logits(expected), atol=1e-5, rtol=0)
