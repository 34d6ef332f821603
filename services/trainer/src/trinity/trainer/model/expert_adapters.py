"""Adapters of a mixture's experts: a product of low rank for each expert, added to the product with its weights.

    y = W_e x + alpha / rank * B_e (A_e x)         (LoRA, arXiv:2106.09685, equation 3, for the expert e of a token)

peft wraps the parameters of a layer's experts and adds B A to the weights of all experts in every forward pass; then
the backward pass computes the gradient of all these weights. Here tokens are sorted by expert, and products are
grouped: the gradient is that of A and B only, and no copy of the weights is made. peft makes the adapters, so their
names, initial values and scales are its own.
"""

from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

_ALIGNMENT = 16  # bytes of rows, for torch's grouped product


def compute_by_expert(model: nn.Module, adapter: str) -> None:
    """Makes the wrappers that peft has put around experts compute by expert."""
    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    for wrapper in wrappers:
        wrapper.forward = wrapper.base_layer.__call__
        for linear, product in ((wrapper.lora_A[adapter], _times_a), (wrapper.lora_B[adapter], _times_b)):
            linear.forward = partial(product, linear, wrapper.num_experts)
        experts = wrapper.get_base_layer()
        adapters = {**getattr(experts.forward, "keywords", {}), wrapper.parameter_name: partial(_added, wrapper)}
        experts.forward = partial(_forward, experts, **adapters)


def _forward(
    experts: Any, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, **adapters: Any
) -> torch.Tensor:
    """Sends the states [N, H] to their experts, `chosen` [N, K], and returns the sums [N, H] by `weights` [N, K].

    adapters: of the parameters of this name, functions of a product's inputs.
    """
    ids, order = chosen.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(experts.num_experts, device=ids.device), right=True).int()
    rows = states[order // chosen.shape[-1]]
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        product = grouped(rows, weight if experts.is_transposed else weight.mT, ends)
        if experts.has_bias:
            product = product + getattr(experts, f"{name}_bias")[ids]
        if name in adapters:
            product = product + adapters[name](rows, ends)
        rows = experts._apply_gate(product) if name == "gate_up_proj" else product
    rows = rows * weights.reshape(-1)[order, None]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return rows[back].view(*chosen.shape, -1).sum(1).to(states.dtype)


def _added(wrapper: Any, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    (adapter,) = wrapper.active_adapters
    product: torch.Tensor = wrapper.lora_B[adapter](wrapper.lora_A[adapter](rows, ends), ends)
    return product * wrapper.scaling[adapter]


def _times_a(linear: nn.Linear, experts: int, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return grouped(rows, linear.weight.view(experts, -1, linear.in_features).mT, ends)


def _times_b(linear: nn.Linear, experts: int, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return grouped(rows, linear.weight.view(linear.out_features, -1, experts).permute(2, 1, 0).contiguous(), ends)


def grouped(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies rows [S, in], sorted by expert, by the experts' weights [experts, in, out].

    ends: int32 [experts], where each expert's rows end. torch's grouped product needs aligned rows and no float64.
    """
    rows, bytes_each = rows.to(weight.dtype), weight.element_size()
    aligned = all(size * bytes_each % _ALIGNMENT == 0 for size in weight.shape[1:])
    if aligned and weight.dtype is not torch.float64:
        return nn.functional.grouped_mm(rows, weight, offs=ends)
    parts = rows.tensor_split(ends[:-1].tolist())
    return torch.cat([part @ one for part, one in zip(parts, weight, strict=True)])
