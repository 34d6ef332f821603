"""Skips updates with a non-finite gradient, so that they do not corrupt the weights.

DeepSpeed skips such an update under some combinations of sharding and dtype, and applies it under others. All of them
call the wrapped optimizer's step, so it is checked there.
"""

import math
from typing import Any

import torch


class FiniteStepGuard:
    """Wraps `optimizer.step`. A skipped update leaves weights and optimizer states unchanged."""

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Any) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._update: Any = optimizer.step
        self._plain = 0.0
        self.closed = False
        self.sound: torch.Tensor | bool = True  # whether the loss of the update is finite
        optimizer.step = self._step  # type: ignore[method-assign]

    @property
    def norm(self) -> float | None:
        """Norm of the newest gradient before clipping, the same on every rank; None: DeepSpeed has computed none."""
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
            self._plain = self._own_norm()
        norm = self.norm
        if self.closed or not self.sound or (norm is not None and not math.isfinite(norm)):
            return None
        return self._update(*args, **kwargs)

    def _own_norm(self) -> float:
        """Without sharding and clipping DeepSpeed computes no norm; every rank has the whole gradient."""
        groups = self._optimizer.param_groups
        return float(torch.nn.utils.get_total_norm([p.grad for g in groups for p in g["params"] if p.grad is not None]))
