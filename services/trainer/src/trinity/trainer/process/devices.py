"""The device of a trainer's rank, and the error when weights and training states do not fit on it."""

import os

import torch

from trinity.config import Plan
from trinity.config.devices import suggest_fix
from trinity.config.memory import Sharding, parameters_of, training_gib
from trinity.runtime import devices
from trinity.runtime.devices import Gpu
from trinity.runtime.errors import InvalidInput, TrinityError, Unavailable
from trinity.trainer.process.ranks import Ranks

FIELD = "TRINITY_TRAINER_DEVICE"


def choose(asked: str, ranks: Ranks) -> str:
    """ "cpu" or "cuda". Raises InvalidInput if GPUs are configured, or present, and this rank cannot use one."""
    device = devices.choose(asked, FIELD, torch.cuda.is_available())
    if device == "cuda":
        check_rank(ranks, torch.cuda.device_count(), torch.distributed.is_nccl_available())
    return device


def check_rank(ranks: Ranks, visible: int, nccl: bool) -> None:
    """Raises InvalidInput unless this rank has a GPU for itself, and NCCL to exchange gradients by."""
    if ranks.local_rank >= visible:
        raise InvalidInput(
            "trainer.num_ranks",
            f"rank {ranks.rank} would be the {ranks.local_rank + 1}th on this machine, which shows {visible} GPU(s) "
            f"(CUDA_VISIBLE_DEVICES); at most {visible} ranks fit",
        )
    if not nccl:
        raise InvalidInput(
            FIELD,
            f"is cuda, but torch {torch.__version__} is built without NCCL, by which ranks on GPUs exchange gradients; "
            f"install torch's own build for CUDA, or set {FIELD}=cpu (gloo)",
        )


def no_room(plan: Plan, ranks: Ranks, card: Gpu, host_memory_gib: float, error: BaseException) -> TrinityError:
    """The error when weights or training states do not fit on a GPU, before the first step.

    InvalidInput if by the estimate they cannot fit; Unavailable if they can, and other processes hold the memory.
    """
    said = f"memory of {card} is not enough for weights and training states"
    known, now = parameters_of(plan.config.model.model_path), Sharding.of(plan, ranks.world_size)
    if known is None:
        return Unavailable(f"{said}, {card.free_gib:.1f} GiB are free ({error})")
    needed = training_gib(plan, known[0], now)
    said += f": by estimate {needed:.1f} GiB on each of {now.ranks} rank(s) under ZeRO {now.zero_stage}"
    if needed < card.total_gib:
        return Unavailable(f"{said}; other processes may hold its memory ({error})")
    way = suggest_fix(plan, known[0], now, card.total_gib, host_memory_gib)
    return InvalidInput("trainer.deepspeed.zero_stage", f"{said}; {way} ({error})")


def card_of(device: torch.device) -> Gpu:
    """The GPU of a rank as it is now."""
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
    return Gpu(str(device.index), torch.cuda.get_device_name(device), total, free, "")


def limit_memory(device: torch.device, gib: float) -> int:
    """Bytes that this process may take of its GPU: `gib`, which torch holds it to, or all of it for 0."""
    total = int(torch.cuda.get_device_properties(device).total_memory)
    if not gib:
        return total
    part = min(1.0, gib * 2**30 / total)
    torch.cuda.set_per_process_memory_fraction(part, device)
    return int(part * total)


def only_deterministic_kernels() -> None:
    """Makes equal inputs give equal bits in this process, more slowly. Call it before the process uses a GPU."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (nothing reads such memory)
