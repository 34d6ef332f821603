"""The trainer's kernels on a CPU: called and compiled as on a GPU but for the last step, which needs one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from trinity.trainer.model import kernels
from trinity.trainer.model import policy as model


@contextmanager
def kernels_on_cpu(backend: Any = "aot_eager") -> Iterator[None]:
    """Models that are loaded in this context have kernels, and functions that are called in it are compiled."""
    with (
        patch.object(model, "wants_kernels", lambda *_: True),
        patch.object(kernels, "_is_on_gpu", lambda _: True),
        patch.object(kernels, "_BACKEND", backend),
    ):
        yield
