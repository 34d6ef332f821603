"""Gradients between the backward passes and the optimizer's step, where DeepSpeed's own handling is not enough."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from trinity.trainer.model.kernels import Kernel

_CHUNK = 2**26  # elements that are updated at once
_CLIP_EPSILON = 1e-6  # DeepSpeed adds it to the norm when it clips


class Fp32GradAccumulator:
    """Adds up gradients in float32: `accumulate` after each backward pass, `write_back` before the update.

    bfloat16 has 8 significant bits: added to a sum 256 times as large, a micro-batch's share is rounded away, and the
    gradient depends on the split. ZeRO 2 and 3 have a setting for float32 sums; ZeRO 0 and 1 add in `.grad`.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad and p.dtype is not torch.float32]
        self._sums: dict[int, torch.Tensor] = {}

    def accumulate(self) -> None:
        """Adds `.grad` to the sums and clears it."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            if index in self._sums:
                self._sums[index].add_(parameter.grad)
            else:
                self._sums[index] = parameter.grad.float()
            parameter.grad = None

    def write_back(self) -> None:
        """Writes the sums to `.grad`, rounded once, and clears them."""
        for index, parameter in enumerate(self._parameters):
            if index in self._sums:
                parameter.grad = self._sums.pop(index).to(parameter.dtype)

    def clear(self) -> None:
        self._sums.clear()


class FiniteStepGuard:
    """Wraps `optimizer.step`: skips updates with a non-finite gradient; weights and optimizer states stay unchanged.

    DeepSpeed skips such an update under some combinations of sharding and dtype, and applies it under others. All of
    them call the wrapped optimizer's step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Any) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._update: Any = optimizer.step
        self._plain = 0.0
        self.closed = False
        self.sound: torch.Tensor | bool = True  # False if the loss of the update is not finite
        optimizer.step = self._step  # type: ignore[method-assign]

    @property
    def norm(self) -> float | None:
        """Norm of the newest gradient before clipping, equal on every rank; None until DeepSpeed has computed one."""
        sharded = self._engine.optimizer
        if hasattr(sharded, "_global_grad_norm"):
            found = sharded._global_grad_norm
        else:
            found = self._engine._global_grad_norm if self._clips else self._plain
        return None if found is None else float(found)

    @property
    def _clips(self) -> bool:
        return bool(self._engine.gradient_clipping() > 0)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self._engine.optimizer, "_global_grad_norm") and not self._clips:
            # Without sharding and clipping DeepSpeed computes no norm; every rank has the whole gradient.
            parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
            self._plain = float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        return None if self.refuses() else self._update(*args, **kwargs)

    def refuses(self) -> bool:
        """Returns True if the pending update must be skipped."""
        norm = self.norm
        return self.closed or not self.sound or (norm is not None and not math.isfinite(norm))


class OneRankUpdate:
    """Replaces how DeepSpeed accumulates gradients and updates weights in ZeRO 2 on one rank, which shards nothing.

    DeepSpeed would copy each gradient into a bucket, divide it by one, add it to a float32 buffer, and take the norm,
    clip, update and round the weights in separate passes. Here a gradient stays as autograd made it until the next
    micro-batch adds to it, and one pass over masters, moments and weights follows the norm. DeepSpeed keeps weights,
    masters and moments, and reads and writes checkpoints.
    """

    def __init__(
        self, sharded: Any, optimizer: torch.optim.Optimizer, grad_clip: float, guard: FiniteStepGuard
    ) -> None:
        """sharded: DeepSpeed's wrapper of `optimizer`, an AdamW."""
        self._sharded, self._optimizer, self._grad_clip, self._guard = sharded, optimizer, grad_clip, guard
        self._weights: torch.Tensor = sharded.bit16_groups_flat[0]
        self._chunks = _chunks(self._weights, sharded.bit16_groups[0])
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        sharded.process_gradients = self._add
        sharded.overlapping_partition_gradients_reduce_epilogue = lambda: None
        sharded.finalize_gradient_accumulation_boundary = lambda: None
        sharded.step = self._step

    def drop(self) -> None:
        """Discards the accumulated gradients."""
        self._sums.clear()

    def _add(self, parameter: torch.nn.Parameter, group: int) -> None:
        """Adds a gradient; autograd calls it once for each. Sums of several are in float32."""
        found, parameter.grad = parameter.grad, None
        if found is None:
            return
        held = self._sums.get(parameter)
        if held is None:
            self._sums[parameter] = found
        elif held.dtype is torch.float32:
            held.add_(found)
        else:
            self._sums[parameter] = held.float().add_(found)

    @torch.no_grad()
    def _step(self, closure: None = None) -> None:
        if self._guard.closed:
            self.drop()
            return
        gradients = [self._taken(parameters) for _, parameters in self._chunks]
        norm = _norm(gradients)
        self._sharded._global_grad_norm = norm
        if self._guard.refuses():
            return
        [group] = self._optimizer.param_groups
        [masters] = group["params"]
        state, weights = self._state(masters, group), self._weights
        numbers = self._numbers(group, state, norm).to(weights.device, non_blocking=True)
        flat = masters.detach(), weights, state["exp_avg"], state["exp_avg_sq"]
        for begin, _ in self._chunks:
            gradient = gradients.pop(0)  # its memory is free after its update
            _UPDATE(*(tensor[begin : begin + len(gradient)] for tensor in flat), gradient, numbers)
        self._sharded._lazy_init_hp_params_optimizer_state()  # for deepspeed.utils.safe_get_full_optimizer_state

    def _taken(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        """Removes and returns the flat gradient of a chunk; zeros for parameters that no loss depended on."""
        parts = [self._sums.pop(p, None) for p in parameters]
        dtype = next((part.dtype for part in parts if part is not None), torch.float32)
        whole = [torch.zeros_like(p, dtype=dtype) if g is None else g for p, g in zip(parameters, parts, strict=True)]
        return whole[0].reshape(-1) if len(whole) == 1 else torch.cat([part.reshape(-1) for part in whole])

    def _state(self, masters: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Optimizer state in the form of torch's AdamW, so that each can continue with checkpoints of the other."""
        state = self._optimizer.state[masters]
        if not state:
            state["step"] = torch.zeros((), device=masters.device if group["fused"] else "cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(masters), torch.zeros_like(masters)
        return state

    def _numbers(self, group: dict[str, Any], state: dict[str, torch.Tensor], norm: float) -> torch.Tensor:
        """Counts the update; returns the numbers of `_adamw` in a tensor: torch.compile recompiles for floats."""
        state["step"] += 1
        count, rate, (beta1, beta2) = float(state["step"]), float(group["lr"]), group["betas"]
        clip = min(1.0, self._grad_clip / (norm + _CLIP_EPSILON)) if self._grad_clip > 0 else 1.0
        root = (1 - beta2**count) ** -0.5
        decay, size = rate * group["weight_decay"], rate / (1 - beta1**count)
        return torch.tensor([clip, 1 - beta1, beta2, 1 - beta2, root, group["eps"], decay, size])


def _chunks(flat: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> list[tuple[int, list[torch.nn.Parameter]]]:
    """Splits parameters into contiguous runs of `flat`; returns each run with the index of its first element."""

    def place(parameter: torch.nn.Parameter) -> int:
        return (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()

    found: list[tuple[int, list[torch.nn.Parameter]]] = []
    end = size = 0
    for parameter in sorted(parameters, key=place):
        begin = place(parameter)
        if not found or begin != end or size + parameter.numel() > _CHUNK:
            found.append((begin, []))
            size = 0
        found[-1][1].append(parameter)
        end, size = begin + parameter.numel(), size + parameter.numel()
    return found


def _norm(gradients: Iterable[torch.Tensor]) -> float:
    """Norm of all gradients together. On CPUs a sum of squares in float32 was wrong by 1e-4; GPUs add in a tree."""
    parts = [part for gradient in gradients for part in gradient.split(_CHUNK)]
    wide = torch.float32 if parts[0].is_cuda else torch.float64
    norms = [torch.linalg.vector_norm(part, dtype=wide) for part in parts]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def _adamw(
    master: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, square: torch.Tensor,
    gradient: torch.Tensor, numbers: torch.Tensor,
) -> None:  # fmt: skip
    """Updates in place by AdamW (arXiv:1711.05101, algorithm 2) with a clipped gradient; all [n]."""
    clip, beta1_less, beta2, beta2_less, root, epsilon, decay, size = numbers.unbind()
    clipped = gradient.float() * clip
    mean.add_((clipped - mean) * beta1_less)
    square.copy_(square * beta2 + clipped * clipped * beta2_less)
    master.sub_(master * decay + mean * size / (square.sqrt() * root + epsilon))
    weight.copy_(master)


_UPDATE = Kernel(_adamw)
