"""The engines' devices, checked before vLLM starts, because vLLM raises its own errors in a child process."""

import os
from collections.abc import Sequence

from trinity.config.memory import ENGINE_BESIDE_GIB, parameters_of
from trinity.explorer.types import EngineFailed, EngineOptions
from trinity.runtime.devices import Gpu, detect_gpus
from trinity.runtime.errors import InvalidInput


def has_nccl() -> bool:
    """True if the workers can enter a collective group on GPUs. Otherwise weights only come by storage."""
    import torch

    return bool(torch.distributed.is_available() and torch.distributed.is_nccl_available())


def platform_of(options: EngineOptions) -> str:
    """The platform on which the bits of samples depend, as in sync.v1.Capabilities."""
    import torch
    from vllm import __version__ as vllm_version
    from vllm.platforms import current_platform

    if options.device == "cpu":
        device = f"cpu with {torch.backends.cpu.get_cpu_capability()}, {len(os.sched_getaffinity(0))} cores"
    else:
        device = f"{options.tensor_parallel_size} x {current_platform.get_device_name()}"
    return f"{device}, {options.engine_dtype}, torch {torch.__version__}, vllm {vllm_version}"


def room_of(options: EngineOptions, devices: str | None) -> dict[str, float | int]:
    """vLLM's memory arguments for an engine's GPUs (`devices`: CUDA_VISIBLE_DEVICES; None for this process's).

    Raises InvalidInput if there are too few GPUs, EngineFailed if other processes hold their memory.
    """
    if options.device != "cuda":
        return {}
    cards = detect_gpus() if devices is None else detect_gpus({"CUDA_VISIBLE_DEVICES": devices})
    memory = memory_arguments(options, cards[: options.tensor_parallel_size])
    check_cards(options, cards, devices, memory["gpu_memory_utilization"])
    return memory


def memory_arguments(options: EngineOptions, cards: Sequence[Gpu]) -> dict[str, float | int]:
    """vLLM's memory arguments.

    On GPUs shared with a trainer the cache has a fixed size, because vLLM would count the trainer's memory as free or
    as used by itself.
    """
    if not options.gpu_memory_gib or not cards:
        return {"gpu_memory_utilization": options.gpu_memory_utilization}
    part = min(options.gpu_memory_gib / min(card.total_gib for card in cards), 1.0)
    known = parameters_of(options.model)
    if known is None:
        return {"gpu_memory_utilization": part}
    weights = known[0] * (4 if options.engine_dtype == "float32" else 2) / options.tensor_parallel_size / 2**30
    cache = options.gpu_memory_gib - weights - ENGINE_BESIDE_GIB
    return {"gpu_memory_utilization": part, "kv_cache_memory_bytes": int(cache * 2**30)}


def check_cards(options: EngineOptions, cards: Sequence[Gpu], devices: str | None, part: float) -> None:
    """Raises InvalidInput for too few GPUs, EngineFailed if less memory is free than vLLM takes when it starts."""
    if not cards:  # no nvidia-smi, or MIG slices: vLLM checks them itself
        return
    wanted = options.tensor_parallel_size
    if len(cards) < wanted:
        here = f"{len(cards)} GPU(s)" + (f" (of {devices!r})" if devices else "")
        raise InvalidInput("explorer.rollout_model.tensor_parallel_size", f"is {wanted}; there are {here}; lower it")
    tight = min(cards[:wanted], key=lambda card: card.free_gib / card.total_gib)
    if tight.free_gib < part * tight.total_gib:
        most = int(100 * tight.free_gib / tight.total_gib) / 100
        key, value = "explorer.rollout_model.gpu_memory_utilization", f"{part:g}"
        if options.memory_key:
            given = options.gpu_memory_gib
            key, value = options.memory_key, f"{given:g}" if given else f"0, which is {part:g} of a GPU"
            most = int(10 * tight.free_gib) / 10
        lower = f", or set it to {most:g} at most" if most else ""
        raise EngineFailed(
            f"{key}: is {value}: {part * tight.total_gib:.1f} GiB of {tight}, of which {tight.free_gib:.1f} GiB are "
            f"free; end what else runs there{lower}"
        )
