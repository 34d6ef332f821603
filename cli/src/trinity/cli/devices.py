"""Which GPUs this machine has, without importing torch, and who gets which."""

import os
import subprocess
from dataclasses import dataclass

from trinity.cli.errors import RunError
from trinity.config import Plan


def visible_gpus() -> list[str]:
    """GPU indices this process may use; CUDA_VISIBLE_DEVICES is respected. Empty on a machine without GPUs."""
    limited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limited is not None:
        return [card.strip() for card in limited.split(",") if card.strip() not in ("", "-1")]
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listing.stdout.split() if listing.returncode == 0 else []


@dataclass(frozen=True)
class Placement:
    """Where things run on this machine. Empty device lists: the CPU."""

    device: str
    explorer: list[str]
    trainer: list[str]
    trainer_ranks: int


def place(plan: Plan, gpus: list[str]) -> Placement:
    """Explorers take engine_num * tensor_parallel_size GPUs, the trainer the rest. RunError if they do not suffice."""
    config = plan.config
    ranks = config.trainer.num_ranks
    if not gpus:
        return Placement("cpu", [], [], ranks or 1)
    limit = config.cluster.gpu_per_node or len(gpus)
    cards = gpus[:limit]
    rollout = config.explorer.rollout_model
    wanted = (
        0 if plan.algorithm.offline or config.mode == "train" else rollout.engine_num * rollout.tensor_parallel_size
    )
    trainer = [] if config.mode == "explore" else cards[wanted:]
    if wanted > len(cards) or (config.mode != "explore" and not trainer):
        raise RunError(
            f"explorer.rollout_model.engine_num: {rollout.engine_num} engines of {rollout.tensor_parallel_size} GPU(s) "
            f"leave none of the {len(cards)} GPU(s) here for the trainer"
        )
    if ranks is not None and ranks > len(trainer) and config.mode != "explore":
        raise RunError(f"trainer.num_ranks: is {ranks}, but {len(trainer)} GPU(s) are left for the trainer")
    trainer = trainer[: ranks or len(trainer)]
    return Placement("cuda", cards[:wanted], trainer, len(trainer) or 1)
