"""The optimizers: AdamW, AdamW with 8-bit moments, and Muon, each under every ZeRO stage."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trinity.config.schema.algorithm import OptimizerConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.engine.slices import Fragment
from trinity.trainer.model.file_parts import FileParts
from trinity.trainer.model.policy import TokenModel

_APART = re.compile(r"embed|norm|conv|bias")  # parameters of several dimensions that are no matrices of a layer
_RMS = 0.2  # of an update's elements, about AdamW's: one learning rate fits both


def make_optimizer(
    module: nn.Module, config: OptimizerConfig, device: torch.device, offloads: bool
) -> torch.optim.Optimizer:
    """Raises InvalidInput if the package of 8-bit moments is missing."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    common: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
    if config.optimizer_type == "muon":
        return Muon(module, momentum=config.momentum, fused=device.type == "cuda", **common)
    if config.optimizer_type == "adamw_8bit":
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError:
            problem = "is adamw_8bit, which needs bitsandbytes; `pip install -e '.[bitsandbytes]'`"
            raise InvalidInput("algorithm.optimizer.optimizer_type", problem) from None
        eight_bit: torch.optim.Optimizer = AdamW8bit(parameters, **common)
        return eight_bit
    if offloads:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(parameters, **common)
    return torch.optim.AdamW(parameters, fused=device.type == "cuda", **common)


@dataclass(frozen=True)
class _Matrix:
    """[rows, columns]. This rank updates `length` elements from `begin` on, which are at `place` of a flat master."""

    rows: int
    columns: int
    begin: int = 0
    length: int = 0
    place: int = 0

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.place : self.place + self.length]


class Muon(torch.optim.AdamW):
    """Muon for the matrices of layers; AdamW for embeddings, the head, norms, biases and convolutions.

    M = momentum M + (1 - momentum) G; W = W (1 - lr decay) - lr 0.2 sqrt(max(rows, columns)) NS(G + momentum (M - G))
    where NS approximates the nearest orthogonal matrix: arXiv:2502.16982, equation 4; torch.optim.Muon computes it.
    A matrix is one of the checkpoint's files: of fused experts each has its own.

    A rank keeps the momentum of the elements that it updates. The update of a matrix is put together on one rank, in
    turns, which orthogonalizes it and sends it to all.
    """

    def __init__(self, module: nn.Module, momentum: float, **common: Any) -> None:
        self._momentum = momentum
        self._matrices = dict(_matrices(module))
        self._placed: dict[torch.Tensor, list[_Matrix]] = {}
        self._ranks, self._has_parts = 1, False
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [parameter for name, parameter in named if (name in self._matrices) is muon], "muon": muon}
            for muon in (False, True)
        ]
        super().__init__([group for group in groups if group["params"]], **common)

    def place(self, fragments: Iterable[Fragment], ranks: int, has_parts: bool) -> None:
        """Finds the matrices in the masters; on every rank the same ones in the same order.

        has_parts: a rank updates only some elements of a matrix.
        """
        self._ranks, self._has_parts = ranks, has_parts
        for fragment in fragments:
            start = 0
            for matrix in self._matrices.get(fragment.name, ()):
                first = max(fragment.start, start)
                last = min(fragment.start + max(fragment.length, 0), start + matrix.size)
                place = fragment.offset + first - fragment.start
                mine = replace(matrix, begin=first - start, length=last - first, place=place)
                mine = mine if mine.length > 0 else matrix
                self._placed.setdefault(fragment.master, []).append(mine)
                start += matrix.size

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = self.param_groups  # DeepSpeed sets the groups of a part of the step
        self.param_groups = [group for group in groups if not group["muon"]]
        super().step()
        self.param_groups = groups
        for group in groups:
            for master in group["params"] if group["muon"] else ():
                if master.grad is not None:
                    self._update(master, group["lr"], group["weight_decay"])

    def _update(self, master: torch.Tensor, rate: float, decay: float) -> None:
        state = self.state[master]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(master)
        assert master.grad is not None
        gradient, mean, flat = master.grad.reshape(-1), state["momentum_buffer"].view(-1), master.detach().view(-1)
        mean.lerp_(gradient, 1 - self._momentum)
        flat.mul_(1 - rate * decay)
        matrices = self._placed[master]
        for turn in (matrices[at : at + self._ranks] for at in range(0, len(matrices), self._ranks)):
            updates = [self._whole(matrix, gradient, mean) for matrix in turn]
            if self._has_parts:
                _wait(dist.reduce(update, owner, async_op=True) for owner, update in enumerate(updates))
            own = 0 if self._ranks == 1 else dist.get_rank()
            if own < len(turn):
                matrix = turn[own]
                updates[own] = orthogonalized(updates[own].view(matrix.rows, matrix.columns)).reshape(-1)
            if self._ranks > 1:
                _wait(dist.broadcast(update, owner, async_op=True) for owner, update in enumerate(updates))
            for matrix, update in zip(turn, updates, strict=True):
                size = rate * _RMS * math.sqrt(max(matrix.rows, matrix.columns))
                matrix.of(flat).add_(update[matrix.begin : matrix.begin + matrix.length], alpha=-size)

    def _whole(self, matrix: _Matrix, gradient: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Returns this rank's elements of the update, and zeros for those of others: the sum is exact."""
        update = torch.zeros(matrix.size, dtype=torch.bfloat16, device=mean.device)
        own = torch.lerp(matrix.of(gradient), matrix.of(mean), self._momentum)
        update[matrix.begin : matrix.begin + matrix.length] = own
        return update


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Orthogonalizes bfloat16 [m, n] by torch.optim.Muon: one step from zero, whose scale is 1 where m <= n."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    found = nn.Parameter(torch.zeros_like(wide))
    found.grad = wide
    torch.optim.Muon([found], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return -(found.detach() if wide is matrix else found.detach().T)


def _wait(works: Iterable[Any]) -> None:
    for work in list(works):
        work.wait()


def _matrices(module: nn.Module) -> Iterator[tuple[str, list[_Matrix]]]:
    """Yields parameters that Muon updates, with the matrices that lie in them one after the other."""
    model: Any = module if isinstance(module, TokenModel) else None
    parts = None if model is None else FileParts(model.model)
    outside = [one for one in module.modules() if isinstance(one, nn.Embedding)] + ([model.head] if model else [])
    apart = {id(parameter) for one in outside for parameter in one.parameters()}
    for name, parameter in module.named_parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if not parameter.requires_grad or len(shape) < 2 or id(parameter) in apart or _APART.search(name):
            continue
        found = parts.of(name.removeprefix(TokenModel.PREFIX), shape) if parts else ()
        shapes = [part.shape for part in found] or [shape]
        yield name, [_Matrix(one[-2], one[-1]) for one in shapes for _ in range(math.prod(one[:-2]))]
