"""Attention kernels for GPUs, over packed sequences of different lengths.

PyTorch has one. FlashAttention 4, from the package flash-attn-4, takes half its time on an H200. Each is tested once
for a model's heads, on random numbers against a known result. FlashAttention 4 runs in another process first
(`python -m trinity.trainer.model.varlen`), since after a fault of the device a process can no longer use the GPU.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from inspect import signature
from typing import Any, Protocol

import structlog
import torch

log = structlog.get_logger(__name__)

_LENGTHS = (3, 130, 1, 700)  # part of a kernel's tile, a single token, more tiles than are prefetched
_WINDOW = 40  # skips whole tiles
_CLOSE = 0.02  # relative to the largest value: both kernels are accurate to about 0.005
_TRIAL_SECONDS = 300.0  # for another process, which imports torch and compiles the kernel


class Kernel(Protocol):
    """q [T, heads, width], k and v [T, key heads, width] -> [T, heads, width].

    ends: starts of the sequences and the end of the last, int32 [sequences + 1]. longest: maximum length. scaling:
    None: by the width. window: number of earlier tokens to which a token attends; None: all.
    """

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int,
        scaling: float | None, window: int | None,
    ) -> torch.Tensor: ...  # fmt: skip


def kernel_for(q: torch.Tensor, k: torch.Tensor, window: int | None) -> Kernel:
    """Returns the fastest kernel that is correct for these heads."""
    return _fastest(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], window is not None)


@cache
def _fastest(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, windowed: bool
) -> Kernel:
    heads_and_window = heads, key_heads, width, _WINDOW if windowed else None
    trial = partial(_trial, device, dtype, *heads_and_window)
    kernels: dict[str, Kernel] = {"FlashAttention 4": flash_attention_4, "PyTorch": pytorch}
    reasons: dict[str, str] = {}
    # A separate thread hides the trial's saved tensors from activation checkpointing of the surrounding layer.
    with ThreadPoolExecutor(1) as apart:
        right = apart.submit(trial, pytorch_repeating).result()
        for name, kernel in kernels.items():
            wrong = _fault_elsewhere(device, dtype, *heads_and_window) if kernel is flash_attention_4 else None
            wrong = wrong or apart.submit(_what_is_wrong, partial(trial, kernel), right).result()
            if wrong is None:
                log.info("trainer.attention.kernel", kernel=name, heads=heads, width=width, not_by=reasons)
                return kernel
            reasons[name] = wrong
    log.info("trainer.attention.kernel", kernel="PyTorch, key heads repeated", heads=heads, width=width, not_by=reasons)
    return pytorch_repeating


def flash_attention_4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int, scaling: float | None,
    window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Raises ImportError if it is not installed, and its compiler's errors for unsupported heads or GPUs."""
    mixed: Any = _flash_attn_4()(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=scaling, causal=window is None, window_size=(None, None) if window is None else (window, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    result: torch.Tensor = mixed[0] if isinstance(mixed, tuple) else mixed
    return result


@cache
def _flash_attn_4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func

    function: Callable[..., Any] = flash_attn_varlen_func
    return function


def pytorch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int, scaling: float | None,
    window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Runs PyTorch's kernel, of which not all versions support grouped-query attention."""
    from torch.nn.attention.varlen import varlen_attn

    shared: dict[str, Any] = {}
    if k.shape[1] != q.shape[1] and "enable_gqa" in signature(varlen_attn).parameters:
        shared["enable_gqa"] = True
    seen = (-1 if window is None else window, 0)
    mixed: Any = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=seen, **shared)
    result: torch.Tensor = mixed
    return result


def pytorch_repeating(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int, scaling: float | None,
    window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Repeats key heads, which takes memory but works with every version."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    return pytorch(q, keys, values, ends, longest, scaling, window)


def _trial(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, window: int | None, kernel: Kernel
) -> list[torch.Tensor]:
    """Returns the kernel's outputs for random numbers, without and with gradients, and the gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def numbers(count: int) -> torch.Tensor:
        """Returns [T, count, width] in the head-major layout of some layers."""
        by_heads = torch.randn(count, sum(_LENGTHS), width, device=device, generator=generator)
        return by_heads.to(dtype).transpose(0, 1)

    q, k, v, weights = (numbers(count) for count in (heads, key_heads, key_heads, heads))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    ends = torch.tensor([0, *_LENGTHS], device=device).cumsum(0).to(torch.int32)
    with torch.cuda.device_of(q), torch.enable_grad():
        with torch.no_grad():  # some kernels have a variant for it
            looked = kernel(q, k, v, ends, max(_LENGTHS), None, window)
        mixed = kernel(q, k, v, ends, max(_LENGTHS), None, window)
        return [looked, mixed.detach(), *torch.autograd.grad(mixed, leaves, weights)]


def _fault_elsewhere(device: torch.device, dtype: torch.dtype, *heads_and_window: int | None) -> str | None:
    """Tries FlashAttention 4 in another process, for at most _TRIAL_SECONDS; returns its error, or None."""
    try:
        _flash_attn_4()
    except Exception as error:  # not installed, or not for this Python or torch
        return f"{type(error).__name__}: {error}"[:300]
    given = str(device), str(dtype).removeprefix("torch."), *(str(number or "") for number in heads_and_window)
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, *given], capture_output=True, text=True, timeout=_TRIAL_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"its trial did not end within {_TRIAL_SECONDS:g} s"
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"its trial ended with exit code {done.returncode}: {last}"[:300] if done.returncode else None


def _try_flash_attention_4(device: str, dtype: str, *heads_and_window: str) -> None:
    heads, key_heads, width, window = (int(number) if number else None for number in heads_and_window)
    assert heads and key_heads and width
    for tensor in _trial(
        torch.device(device), getattr(torch, dtype), heads, key_heads, width, window, flash_attention_4
    ):
        tensor.sum().item()  # waits for the device


def _what_is_wrong(trial: Callable[[], list[torch.Tensor]], right: list[torch.Tensor]) -> str | None:
    """Runs a trial; returns its error or first mismatch, or None."""
    try:
        found = trial()
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernel
    except Exception as error:  # from a compiler, a missing package, or this GPU
        return f"{type(error).__name__}: {error}"[:300]
    return difference(("output without gradients", "output", "dq", "dk", "dv"), found, right)


def difference(names: Sequence[str], found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> str | None:
    """Returns the first tensor that differs by more than rounding, as text; None if all agree."""
    for name, one, other in zip(names, found, right, strict=True):
        most = (one - other).abs().max() / other.abs().max()
        if not most <= _CLOSE:  # also true for NaN
            return f"{name} differs by {float(most):.3g} of the largest"
    return None


if __name__ == "__main__":
    _try_flash_attention_4(*sys.argv[1:])
