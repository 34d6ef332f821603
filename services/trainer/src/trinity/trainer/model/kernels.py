"""Functions of tensors that torch.compile fuses to one kernel on a GPU; on CPUs they run uncompiled.

PyTorch runs a norm, a gate or a rotation as a dozen operations, each of which reads and writes all activations.
"""

import os
from collections.abc import Callable
from functools import cache, cached_property
from inspect import signature
from typing import Any

import structlog
import torch

log = structlog.get_logger(__name__)

_BACKEND: Any = "inductor"
_VARIANTS = 64  # of a kernel: by width, dtype, and the arguments with a gradient


class Kernel:
    """varying: {argument: dimension} that differs from call to call; None: every dimension of every argument."""

    def __init__(self, function: Callable[..., Any], varying: dict[int, int] | None = None) -> None:
        self.plain = function
        self._varying = varying or {}

    @cached_property
    def _compiled(self) -> Any:
        """The function, compiled on first use, since that loads PyTorch's whole compiler."""
        known = signature(torch.compile).parameters  # before PyTorch 2.12 the limit is global: see can_compile
        limit: dict[str, Any] = {"recompile_limit": _VARIANTS} if "recompile_limit" in known else {}
        return torch.compile(self.plain, backend=_BACKEND, dynamic=None if self._varying else True, **limit)

    def __call__(self, *args: Any, **others: Any) -> Any:
        if not _is_on_gpu(args[0]):
            return self.plain(*args, **others)
        for argument, dimension in self._varying.items():
            if argument < len(args) and args[argument] is not None:  # else it is a keyword argument or left out
                torch._dynamo.maybe_mark_dynamic(args[argument], dimension)
        return self._compiled(*args, **others)


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


@cache
def can_compile() -> bool:
    """Returns True if torch.compile works on the GPU (it needs Triton and a C compiler); else logs the reason."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each rank keeps up to 32 processes
    torch._dynamo.config.recompile_limit = _VARIANTS
    try:
        number = torch.ones(2, device="cuda", requires_grad=True)
        torch.compile(lambda x: (x * 2).sum())(number).backward()
    except Exception as error:  # from the compiler, Triton or the machine
        log.warning("trainer.kernels.not_compiled", reason=f"{type(error).__name__}: {error}"[:500])
        return False
    return True
