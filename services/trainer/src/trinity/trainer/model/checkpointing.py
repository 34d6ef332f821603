"""Activation checkpointing: the backward pass recomputes activations instead of keeping them in memory.

It covers whole layers, or only their MLPs, which on GPUs have two thirds of the activations and recompute two matrix
products.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

RECOMPUTE = "trinity_recompute"  # an attribute of modules whose activations are recomputed

Checkpointing = bool | Literal["mlp"]


def recompute_activations(model: Any, what: Checkpointing, number: int | None = None) -> None:
    """Enables it in the first `number` layers of a transformers model (None: all); whole layers if they have no MLP.

    Call after `fused.fuse`.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not what:
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    mlps: list[Any] = [layer.mlp for layer in layers if hasattr(layer, "mlp")]
    chosen = (mlps if what == "mlp" and mlps else layers)[:number]
    if what == "mlp" and mlps:
        for mlp in chosen:
            mlp.forward = partial(_recomputed, mlp.forward)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in layers[len(chosen) :]:
            layer.gradient_checkpointing = False
    for whole in chosen:
        for module in whole.modules():  # an MLP may contain others
            setattr(module, RECOMPUTE, True)


def _recomputed(forward: Callable[..., Any], *args: Any, **others: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **others)
    return checkpoint(forward, *args, use_reentrant=False, **others)
