"""A reference model in host memory, copied to the device only while it is used (`offload_reference`)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.func import functional_call

from trinity.trainer.data.microbatch import MicroBatch
from trinity.trainer.model.policy import PolicyModel


class OffloadedReference:
    """Frozen, so nothing is written back: the copy on the device is discarded."""

    def __init__(self, model: PolicyModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._copy: dict[str, torch.Tensor] = {}
        if device.type == "cuda":
            for _, tensor in self._tensors():
                tensor.data = tensor.data.pin_memory()

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's forward; valid within `on_device`."""
        found: tuple[torch.Tensor, torch.Tensor] = functional_call(self._model, self._copy, (micro,))
        return found

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within it the device has a copy of the model. Raises torch.OutOfMemoryError."""
        try:
            for name, tensor in self._tensors():
                self._copy[name] = tensor.to(self._device, non_blocking=True)
            yield
        finally:
            self._copy.clear()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tied ones once."""
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()
