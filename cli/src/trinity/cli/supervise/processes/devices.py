"""The assignment of this machine's GPUs to processes."""

import time
from collections.abc import Collection
from dataclasses import dataclass

from trinity.config import Plan, Problem, devices
from trinity.config.devices import MemorySplit
from trinity.reading.errors import RunError
from trinity.runtime.devices import detect_gpus

_BUSY_PART = 0.5  # of a GPU's memory
_FREED_SECONDS = 5.0  # in which the driver frees the memory of processes that have ended


@dataclass(frozen=True)
class Placement:
    """Devices of the processes on this machine. Empty lists mean the CPU. `explorer` includes auxiliary models."""

    device: str
    explorer: list[str]
    trainer: list[str]
    trainer_ranks: int
    split: MemorySplit | None = None  # of each GPU's memory, where the trainer shares the engines' GPUs

    def devices_of(self, plan: Plan) -> dict[str, float]:
        """Returns the devices of explorer and trainer; a shared GPU counts half for each.

        On CPUs, the number that the YAML declares counts: a rank, or a worker of an engine.
        """
        engines = len(self.explorer) or plan.gpus.explorer + plan.gpus.auxiliary
        shared = 0.5 * self.trainer_ranks if self.split else 0.0
        return {"explorer": engines - shared, "trainer": self.trainer_ranks - shared}


def place(plan: Plan, gpus: list[str], taken: Collection[str] = ()) -> Placement:
    """Assigns engine_num * tensor_parallel_size GPUs to explorer and auxiliary models each, and the rest to the
    trainer.

    Without a rest the trainer shares the GPUs of the engines. `taken` are GPUs that other processes of the run hold on
    this machine. Raises RunError if the others do not suffice.
    """
    config = plan.config
    ranks = config.trainer.num_ranks
    if not gpus:
        return Placement("cpu", [], [], ranks or 1)
    free = [card for card in gpus if card not in taken]
    cards = free[: config.cluster.gpu_per_node or len(free)]
    here = f"the {len(cards)} GPU(s) free here"
    wanted = plan.gpus.explorer + plan.gpus.auxiliary
    trains = config.mode in ("both", "train")
    if devices.shares(plan, len(cards)):
        return _share(plan, cards)
    if wanted + (config.mode == "train") > len(cards):
        rollout, beside = config.explorer.rollout_model, ""
        if plan.gpus.auxiliary:
            beside = f" and auxiliary models on {plan.gpus.auxiliary}"
        need = f"{rollout.engine_num} engine(s) of {rollout.tensor_parallel_size} GPU(s){beside}"
        raise RunError(f"explorer.rollout_model.engine_num: {need} do not fit on {here}")
    trainer = cards[wanted:] if trains else []
    if ranks is not None and ranks > len(trainer) and trains:
        raise RunError(f"trainer.num_ranks: is {ranks}, but {len(trainer)} of {here} are left for the trainer")
    trainer = trainer[: ranks or len(trainer)]
    return Placement("cuda", cards[:wanted], trainer, len(trainer) or 1)


def _share(plan: Plan, cards: list[str]) -> Placement:
    """Puts the trainer on the engines' GPUs. The smallest GPU determines how memory is divided."""
    ranks = devices.ranks_sharing(plan)
    shared = detect_gpus({"CUDA_VISIBLE_DEVICES": ",".join(cards[: plan.gpus.explorer])})
    if not shared:  # nvidia-smi does not say how much memory it has
        problem = "engine and trainer would share a GPU whose memory nvidia-smi does not report; use another"
        raise RunError(f"explorer.rollout_model.engine_num: {problem}")
    split = devices.split_memory(plan, min(shared, key=lambda card: card.total_gib), ranks)
    if isinstance(split, Problem):
        raise RunError(str(split))
    return Placement("cuda", cards, cards[:ranks], ranks, split)


def busy_gpus(placement: Placement) -> str:
    """Returns a sentence on GPUs of the placement whose memory other processes hold; empty if there is none."""
    cards = dict.fromkeys([*placement.explorer, *placement.trainer])
    deadline = time.monotonic() + _FREED_SECONDS
    while held := [
        card
        for card in (detect_gpus({"CUDA_VISIBLE_DEVICES": ",".join(cards)}) if cards else [])
        if card.free_gib < (1 - _BUSY_PART) * card.total_gib
    ]:
        if time.monotonic() > deadline:
            each = ", ".join(f"{card.free_gib:.1f} GiB are free of {card}" for card in held)
            return f"other processes use this run's GPUs: {each}; name others by CUDA_VISIBLE_DEVICES, or end them"
        time.sleep(_FREED_SECONDS / 10)
    return ""
