"""The adapters of several names in one model: removes some, and computes rows of a batch with different ones."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def remove_adapter(model: nn.Module, adapter: str) -> None:
    """Removes the adapters of this name."""
    for layer in _adapted(model):
        layer.delete_adapter(adapter)


@contextmanager
def several_adapters(model: nn.Module, rows: Sequence[str]) -> Iterator[None]:
    """Makes the model compute each row of a batch [B, N] with the adapters of another name.

    The adapters of all names are one: A by A, B by B, along their ranks. What a row's own A did not give is multiplied
    by zero, so a value that is not finite in one name's adapters or rows spoils those of others. Adapters of another
    dtype are converted to that of x.
    """
    names = list(dict.fromkeys(rows))
    layers = _adapted(model)
    adapted = [(layer, tuple(name for name in names if name in layer.lora_A)) for layer in layers]
    scales: dict[Any, torch.Tensor] = {}
    for layer, own in adapted:
        ranks = tuple((layer.r[name], layer.scaling[name]) for name in own)
        if own and (own, ranks) not in scales:
            table = [[scale if name == row else 0.0 for name, (rank, scale) in zip(own, ranks, strict=True)
                      for _ in range(rank)] for row in rows]  # fmt: skip
            scales[own, ranks] = torch.tensor(table, device=layer.weight.device, dtype=layer.weight.dtype)[:, None]
        layer.forward = _sum_of(layer, own, scales[own, ranks]) if own else layer.base_layer.__call__
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _sum_of(layer: Any, names: Sequence[str], scales: torch.Tensor) -> Any:
    """Returns a layer's function of x [B, N, in]. scales: of each row and rank, [B, 1, ranks of all names]."""
    a = torch.cat([layer.lora_A[name].weight for name in names])
    b = torch.cat([layer.lora_B[name].weight for name in names], dim=1)

    def computed(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer.base_layer(x)
        return found + ((x @ a.to(x.dtype).T) * scales) @ b.to(x.dtype).T

    return computed


def _adapted(model: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]
