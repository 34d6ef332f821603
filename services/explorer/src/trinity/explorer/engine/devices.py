"""The engines' devices, checked before vLLM starts, because vLLM raises its own errors in a child process."""

from collections.abc import Sequence

from trinity.config.devices import Gpu, detect_gpus, device_of, torch_build
from trinity.explorer.types import EngineFailed, EngineOptions
from trinity.runtime.errors import InvalidInput

FIELD = "TRINITY_EXPLORER_DEVICE"


def choose(asked: str) -> str:
    """ "cpu" or "cuda". InvalidInput if GPUs are asked for, or are here, and torch cannot use them."""
    import torch

    available = torch.cuda.is_available()
    gpus = [] if available or asked == "cpu" else detect_gpus()
    try:
        return device_of(asked, FIELD, available, gpus, torch_build())
    except ValueError as error:
        raise InvalidInput(FIELD, str(error)) from None


def has_nccl() -> bool:
    """Whether the workers can enter a collective group on GPUs; without it weights come by storage alone."""
    import torch

    return bool(torch.distributed.is_available() and torch.distributed.is_nccl_available())


def check_room(options: EngineOptions, devices: str | None) -> None:
    """Whether the GPUs of an engine (CUDA_VISIBLE_DEVICES; None: this process's) have the room it asks for, or raises.

    InvalidInput if they are too few; EngineFailed if others hold their memory, perhaps processes that are ending.
    """
    if options.device == "cuda":
        check_cards(
            options, detect_gpus() if devices is None else detect_gpus({"CUDA_VISIBLE_DEVICES": devices}), devices
        )


def check_cards(options: EngineOptions, cards: Sequence[Gpu], devices: str | None) -> None:
    """vLLM takes its part of each GPU's memory at once, and refuses to start if less is free."""
    if not cards:  # no nvidia-smi, or MIG slices: vLLM checks them itself
        return
    wanted, part = options.tensor_parallel_size, options.gpu_memory_utilization
    if len(cards) < wanted:
        here = f"{len(cards)} GPU(s)" + (f" (of {devices!r})" if devices else "")
        raise InvalidInput("explorer.rollout_model.tensor_parallel_size", f"is {wanted}; there are {here}; lower it")
    tight = min(cards[:wanted], key=lambda card: card.free_gib / card.total_gib)
    if tight.free_gib < part * tight.total_gib:
        most = int(100 * tight.free_gib / tight.total_gib) / 100
        raise EngineFailed(
            f"explorer.rollout_model.gpu_memory_utilization: is {part:g}: {part * tight.total_gib:.1f} GiB of {tight}, "
            f"of which {tight.free_gib:.1f} GiB are free; end what else runs there, or set it to {most:g} at most"
        )
