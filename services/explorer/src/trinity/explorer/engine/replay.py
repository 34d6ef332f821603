"""Loads weights again by replaying the copies that the first load made.

A model's `load_weights` finds the destination of every checkpoint tensor in Python, which takes longer than the
transfer. Where a model only fuses and slices the checkpoint's parameters, every load makes the same copies, from a part
of a tensor to a part of a parameter. So the first load is recorded, and later loads replay its copies, a bucket at a
time. A model that does anything else with a tensor is never replayed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import structlog
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

log = structlog.get_logger(__name__)

Named = tuple[str, torch.Tensor]
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


class Loader:
    """Loads whole versions into a model's parameters where they are."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layout: Sequence[Any] = ()
        self._places: list[Any] = []
        self._copies: list[list[_Copy]] | None = None  # of each tensor; None: they cannot be replayed

    @torch.no_grad()
    def load(self, layout: Sequence[Any], buckets: Iterable[list[Named]]) -> None:
        """Load the tensors of all buckets, each contiguous; `layout` has their names, dtypes and shapes in order.

        Raises what `load_weights` and `buckets` raise; part of the weights is new then.
        """
        if self._layout != layout or self._places != _places(self._model):
            self._watch(layout, buckets)
        elif self._copies is None:
            self._model.load_weights(chain.from_iterable(buckets))
        else:
            _replay(self._copies, buckets)

    def _watch(self, layout: Sequence[Any], buckets: Iterable[list[Named]]) -> None:
        self._layout, self._copies = (), None  # after a failed load there are no copies
        with _Watch(self._model) as watch:
            self._model.load_weights(watch.given(chain.from_iterable(buckets)))
        reason = watch.obstacle()
        log.info("explorer.loading.watched", tensors=len(layout), replayed=not reason, reason=reason)
        self._copies = None if reason else watch.copies
        self._layout, self._places = layout, _places(self._model)


@dataclass(frozen=True)
class _Copy:
    """From a part of a given tensor; offset and stride are in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    target: torch.Tensor  # part of a parameter

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


def _replay(copies: list[list[_Copy]], buckets: Iterable[list[Named]]) -> None:
    of_each = iter(copies)
    for bucket in buckets:
        pairs = [
            (copy.target, copy.source(tensor))
            for (_, tensor), made in zip(bucket, of_each, strict=False)
            for copy in made
        ]
        if pairs:
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(targets, sources)


def _places(model: torch.nn.Module) -> list[Any]:
    """Addresses of the parameters. A replaced parameter has another address while the copies hold the old one."""
    return [(p.data_ptr(), p.dtype, p.shape, p.stride()) for p in model.parameters()]


class _Watch(TorchDispatchMode):
    """Records the operations on the tensor given last, and on the parameters.

    Operations on an earlier tensor are not seen until their result is written to a parameter. That is no plain copy.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.copies: list[list[_Copy]] = []
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._given: torch.Tensor = torch.empty(0)
        self._written: list[torch.Tensor] = []
        self._else = ""

    def given(self, tensors: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in tensors:
            self._given = tensor
            self.copies.append([])
            yield name, tensor
            self._given = torch.empty(0)  # operations between two tensors are not the model's

    def obstacle(self) -> str:
        """The reason why the copies cannot be replayed: other operations, or a dependency on their order."""
        if self._else:
            return self._else
        if not all(target.is_contiguous() for target in self._written):
            return "a part of a parameter is not contiguous"
        ends = sorted((target.data_ptr(), target.data_ptr() + target.nbytes) for target in self._written)
        return "a part of a parameter is written twice" if any(a[1] > b[0] for a, b in pairwise(ends)) else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.numel()]
        if tensors and not func.is_view:
            self._note(func, tensors)
        return result

    def _note(self, func: Any, tensors: list[torch.Tensor]) -> None:
        target, source = tensors[0], tensors[-1]
        merely = func is torch.ops.aten.copy_.default and source.dtype == self._given.dtype
        if merely and self._is_parameter(target) and self._is_given(source):
            start = (source.data_ptr() - self._given.data_ptr()) // source.itemsize
            source = source.expand_as(target)
            self.copies[-1].append(_Copy(start, tuple(source.shape), source.stride(), target.detach()))
            self._written.append(target.detach())
        elif func in _FILLS and self._is_parameter(target):
            self._written.append(target.detach())  # the copies keep the rest of the parameter
        elif any(self._is_parameter(tensor) or self._is_given(tensor) for tensor in tensors):
            self._else = f"{func} is done with a tensor"

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._parameters

    def _is_given(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self._given.data_ptr() < self._given.nbytes
