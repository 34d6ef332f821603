"""A copy of the weights in host memory, to be published while the next step changes the weights themselves."""

from collections.abc import Iterator, Sequence

import torch

from trinity.trainer.weights.shards import Weights
from trinity.weights import TensorInfo

_ALIGNMENT = 16  # bytes: a tensor of any dtype can begin there


class Snapshot:
    """reserve -> (take -> iterate) any number of times. A `take` uses the same memory: nothing may read it any more.

    Where there is a GPU the memory is pinned, for copies at the speed of the bus.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._tensors: list[tuple[str, torch.Tensor]] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors)

    def reserve(self, layout: Sequence[TensorInfo]) -> None:
        """Allocate the memory for tensors that `layout` describes."""
        size = sum(_rooms(layout))
        if self._buffer.numel() != size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)

    @torch.no_grad()
    def take(self, layout: Sequence[TensorInfo], weights: Weights) -> "Snapshot":
        """Copy the tensors, which `layout` describes; returns itself. Reserves memory unless it is there."""
        self._tensors = []
        self.reserve(layout)
        for (name, tensor), room in zip(weights, self._buffer.split(_rooms(layout)), strict=True):
            size = tensor.numel() * tensor.element_size()
            copy = room[:size].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=True)
            self._tensors.append((name, copy))
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        return self


def _rooms(layout: Sequence[TensorInfo]) -> list[int]:
    """Bytes of each tensor's place."""
    return [-(-tensor.size_bytes // _ALIGNMENT) * _ALIGNMENT for tensor in layout]
