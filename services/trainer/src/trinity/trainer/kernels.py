"""Functions of tensors that become one kernel on a GPU; elsewhere they stay what they are.

A norm, a gate, a rotation are a dozen operations for PyTorch, each of which reads and writes all of the activations.
torch.compile makes one kernel of them, when they are first called on a GPU.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import structlog
import torch

log = structlog.get_logger(__name__)

_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


class Kernel:
    """`varying`: which dimension of an argument differs from call to call, {argument: dimension}; None: all of all."""

    def __init__(self, function: Callable[..., Any], varying: dict[int, int] | None = None) -> None:
        self.plain = function
        self._compiled = torch.compile(function, dynamic=True if varying is None else None)
        self._varying = varying or {}

    def __call__(self, *args: Any, **others: Any) -> Any:
        if not args[0].is_cuda:
            return self.plain(*args, **others)
        for argument, dimension in self._varying.items():
            torch._dynamo.maybe_mark_dynamic(args[argument], dimension)
        return self._compiled(*args, **others)


@cache
def can_compile() -> bool:
    """Whether torch.compile works on the GPU: it needs Triton and a C compiler. If not, the log says why."""
    from torch._inductor import config

    if _THREADS not in os.environ:
        config.compile_threads = 1  # else up to 32 processes, for every rank, as long as it lives
    try:
        number = torch.ones(2, device="cuda", requires_grad=True)
        torch.compile(lambda x: (x * 2).sum())(number).backward()
    except Exception as error:  # of the compiler, of Triton, of the machine
        log.warning("trainer.kernels.not_compiled", reason=f"{type(error).__name__}: {error}"[:500])
        return False
    return True
