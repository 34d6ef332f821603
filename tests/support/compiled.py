"""The trainer's kernels on a CPU: compiled as on a GPU but for the last step, which needs one."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from trinity.trainer import model
from trinity.trainer.kernels import Kernel


@cache
def compiled(kernel: Kernel) -> Any:
    return torch.compile(kernel.plain, backend="aot_eager", dynamic=None if kernel._varying else True)


def call(kernel: Kernel, *args: Any, **others: Any) -> Any:
    for argument, dimension in kernel._varying.items():
        torch._dynamo.maybe_mark_dynamic(args[argument], dimension)
    return compiled(kernel)(*args, **others)


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Models that are loaded within it have kernels."""
    with patch.object(model, "wants_kernels", lambda *_: True), patch.object(Kernel, "__call__", call):
        yield
