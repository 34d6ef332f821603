"""Where the checkpoints of a job lie, for those who only read them. The trainer writes them."""

import re
from pathlib import Path

_NAME = re.compile(r"global_step_(\d+)")
COMPLETE = ".full_checkpoint"  # written last; a folder without it is no checkpoint
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None for any other name."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def complete_steps(job_dir: Path) -> list[int]:
    """Steps of all complete checkpoints, ascending."""
    if not job_dir.is_dir():
        return []
    found = [(step_of(path), path) for path in job_dir.iterdir()]
    return sorted(step for step, path in found if step is not None and (path / COMPLETE).exists())


def model_folder(job_dir: Path, step: int) -> Path:
    return job_dir / f"global_step_{step}" / "actor" / "huggingface"


def has_weights(folder: Path) -> bool:
    """Whether a Hugging Face folder holds weights beside its configuration."""
    return any((folder / name).is_file() for name in WEIGHTS)


def newest_model(job_dir: Path) -> tuple[int, Path] | None:
    """Step and Hugging Face folder of the newest checkpoint that has weights."""
    for step in reversed(complete_steps(job_dir)):
        folder = model_folder(job_dir, step)
        if has_weights(folder):
            return step, folder
    return None
