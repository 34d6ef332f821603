"""Fused kernels that replace the many small operations in the layers of a transformers model.

On an H200 these operations take longer than the matrix products between them. A module is replaced only if it gives the
same result for random numbers: a norm that adds one to its weight, or a gate other than SiLU, is not replaced.
"""

import sys
from functools import partial
from inspect import signature
from typing import Any

import structlog
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu

from trinity.trainer.model.checkpointing import RECOMPUTE
from trinity.trainer.model.kernels import Kernel, can_compile

log = structlog.get_logger(__name__)

# Parameters. A run of a smaller model ends before the kernels have saved the half minute of their compilation.
_LARGE_ENOUGH = 100_000_000
_ROTATION = "apply_rotary_pos_emb"


def _rms_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[N, H], [H] -> [N, H]: normalised in float32."""
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(states.dtype)


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu(gate) * up


_NORM, _GATE = Kernel(_rms_norm, {0: 0}), Kernel(_gated, {0: 0, 1: 0})


def wants_kernels(model: nn.Module, choice: bool | None) -> bool:
    """Returns True if a model on a GPU is to be fused: by configuration, or by its size; never without a compiler."""
    if choice is None:
        choice = sum(parameter.numel() for parameter in model.parameters()) >= _LARGE_ENOUGH
    return choice and can_compile()


def fuse(model: nn.Module) -> dict[str, int]:
    """Replaces known modules; returns the number of each kind. Call before DeepSpeed and LoRA wrap the model."""
    known: dict[type, Any] = {}
    found = {"norms": 0, "gates": 0, "rotations": 0}
    for module in model.modules():
        kind = type(module)
        if kind not in known:
            known[kind] = "norms" if _is_rms_norm(module) else "gates" if _is_gated(module) else None
        if known[kind]:
            found[known[kind]] += 1
            module.forward = partial(_norm_forward if known[kind] == "norms" else _gated_forward, module)
    found["rotations"] = _fuse_rotation(sys.modules[type(model).__module__])
    log.info("trainer.model.fused", **found)
    return found


def is_lean(model: Any, found: dict[str, int]) -> bool:
    """Returns True if all norms and gates of the layers were replaced, so that they keep little for the backward pass.

    found: the result of `fuse`. Experts do not count as gates.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 0)
    has_experts = bool(getattr(config, "num_experts_per_tok", None))
    return found["gates"] == layers and found["norms"] > 2 * layers and not has_experts


def _fuse_rotation(home: Any) -> int:
    """Replaces the rotation in transformers' module of the model, for all models of that module."""
    rotation = getattr(home, _ROTATION, None)
    if rotation is None:
        return 0
    if not isinstance(rotation, _Rotation):
        if list(signature(rotation).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
            return 0  # it rotates one tensor at a time, or more than queries and keys
        setattr(home, _ROTATION, _Rotation(rotation))
    return 1


class _Rotation:
    """Rotates heads q and k [B, heads, T, width] by cos and sin [B, T, width].

    The kernel works on [B, T, heads, width], the layout of projections and attention, so nothing is copied.
    """

    def __init__(self, rotation: Any) -> None:
        self._kernel = Kernel(rotation, {0: 1, 1: 1, 2: 1, 3: 1})

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if unsqueeze_dim != 1:
            plain: tuple[torch.Tensor, torch.Tensor] = self._kernel.plain(q, k, cos, sin, unsqueeze_dim)
            return plain
        q, k = self._kernel(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
        return q.transpose(1, 2), k.transpose(1, 2)


def _norm_forward(norm: Any, states: torch.Tensor) -> torch.Tensor:
    rows = states.reshape(-1, states.shape[-1])
    result: torch.Tensor = _NORM(rows, norm.weight, norm.variance_epsilon).view(states.shape)
    return result


def _gated_forward(mlp: Any, states: torch.Tensor) -> torch.Tensor:
    """The backward pass recomputes the product: it is cheap, and as large as gate or up, which are kept."""
    rows = states.reshape(-1, states.shape[-1])
    gate, up = mlp.gate_proj(rows), mlp.up_proj(rows)
    product = _GATE(gate, up)
    if not torch.is_grad_enabled() or getattr(mlp, RECOMPUTE, False):
        result = mlp.down_proj(product)
    else:
        address, inputs = product.data_ptr(), (gate.detach(), up.detach())
        with saved_tensors_hooks(partial(_without, address), partial(_again, inputs)):
            result = mlp.down_proj(product)
    shaped: torch.Tensor = result.view(*states.shape[:-1], -1)
    return shaped


def _without(address: int, tensor: torch.Tensor) -> torch.Tensor | torch.Size:
    """Saves only the shape of the tensor at this address, and other tensors whole."""
    return tensor.shape if tensor.data_ptr() == address else tensor


@torch.no_grad()
def _again(inputs: tuple[torch.Tensor, torch.Tensor], packed: torch.Tensor | torch.Size) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else _GATE(*inputs).view(packed)


@torch.no_grad()
def _is_rms_norm(module: nn.Module) -> bool:
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or epsilon is None or weight.dim() != 1:
        return False
    states = _numbers(2, len(weight)).to(weight)
    return torch.equal(module(states), _rms_norm(states, weight, epsilon))


@torch.no_grad()
def _is_gated(module: Any) -> bool:
    parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(part, nn.Linear) for part in parts):
        return False
    gate, up, down = parts
    states = _numbers(2, gate.in_features).to(gate.weight)
    return torch.equal(module(states), down(_gated(gate(states), up(states))))


def _numbers(*shape: int) -> torch.Tensor:
    """Returns random numbers without a change of the global random state."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))
