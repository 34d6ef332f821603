"""Holds the frozen linear layers of a model with adapters in four bits, as QLoRA does.

    y = W x + b,   dL/dx = W^T dL/dy,   W = dequantize(codes)

The matrix exists at full width only while a layer multiplies: in the forward pass, and again in the backward pass.
"""

from typing import Any

import torch
from torch import nn

from trinity.config.checks.lora import PLACE, in_four_bits
from trinity.runtime.errors import InvalidInput
from trinity.trainer.model.file_parts import FileParts
from trinity.weights.four_bit import dequantize, quantize

_FIELD = f"{PLACE}.load_in_4bit"


class FourBitLinear(nn.Module):
    """A frozen linear layer. `codes` is no parameter and lies in no checkpoint: every start makes it from the base."""

    codes: torch.Tensor

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        codes, self._state = quantize(linear.weight.detach().to(device))
        self.register_buffer("codes", codes, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix [out, in], made anew at each access."""
        return dequantize(self.codes, self._state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(x, self)
        return product if self.bias is None else product + self.bias

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._state.to(self.codes.device)  # floats that must stay float32: bfloat16() does not reach them
        return self


class _Product(torch.autograd.Function):
    """x [..., in] times the layer's matrix."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FourBitLinear) -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.layer.weight.to(gradient.dtype), None


def four_bit_layers(model: nn.Module) -> list[str]:
    """Returns the names of the linear layers to hold in four bits, before adapters are added.

    Engines choose matrices by their names in the files. Raises InvalidInput for a model in which such a matrix is not
    the weight of one plain linear layer, since the trainer would compute with others.
    """
    parts, found = FileParts(model), []
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        module, _, kind = name.rpartition(".")
        layer = model.get_submodule(module)
        own = kind == "weight" and type(layer).forward is nn.Linear.forward and in_four_bits(name, shape)
        files = [in_four_bits(part.name, part.shape) for part in parts.of(name, shape)]
        if files != [own] and (own or any(files)):
            what = f"is true, and {name} of the model is no plain linear layer; set it to false"
            raise InvalidInput(_FIELD, what)
        found += [module] if own else []
    return found


def hold_in_four_bits(model: nn.Module, names: list[str], device: torch.device) -> None:
    """Replaces the named linear layers one by one; inside an adapter, the layer that it wraps."""
    for name in names:
        layer = model.get_submodule(name)
        parent, kind = (layer, "base_layer") if hasattr(layer, "base_layer") else _place(model, name)
        setattr(parent, kind, FourBitLinear(getattr(parent, kind), device))


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, kind = name.rpartition(".")
    return model.get_submodule(parent), kind


def elements_in_four_bits(model: nn.Module) -> int:
    """Returns the number of matrix elements that are no parameters of the model any more."""
    layers = (module for module in model.modules() if isinstance(module, FourBitLinear))
    return sum(layer.in_features * layer.out_features for layer in layers)
