"""Gradients of micro-batches added up in float32 where DeepSpeed would add them in the parameters' dtype.

bfloat16 has 8 significant bits: beside a sum 256 times as large a micro-batch's share is rounded away, and the gradient
depends on the split. ZeRO 2 and 3 can be told to add in float32; ZeRO 0 and 1 leave it to `.grad`.
"""

from collections.abc import Iterable

import torch


class Fp32GradAccumulator:
    """For parameters that are not float32: `accumulate` after each backward pass, `write_back` before the update."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad and p.dtype is not torch.float32]
        self._sums: dict[int, torch.Tensor] = {}

    def accumulate(self) -> None:
        """Add `.grad` to the sums and clear it."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            if index in self._sums:
                self._sums[index].add_(parameter.grad)
            else:
                self._sums[index] = parameter.grad.float()
            parameter.grad = None

    def write_back(self) -> None:
        """Write the sums to `.grad`, rounded once, and clear them."""
        for index, parameter in enumerate(self._parameters):
            if index in self._sums:
                parameter.grad = self._sums.pop(index).to(parameter.dtype)

    def clear(self) -> None:
        self._sums.clear()
