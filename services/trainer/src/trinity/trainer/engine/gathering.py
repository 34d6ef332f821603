"""ZeRO-3's parameters as whole tensors, without DeepSpeed's own way: one collective a bucket, one bucket ahead.

GatheredParameters begins a collective for each parameter, waits for all of them, and frees what persists afterwards.
Here the ranks' shards (`ds_tensor`: a parameter laid flat, padded, and cut into as many equal parts as there are ranks)
are packed, gathered and cut out again; DeepSpeed's parameters stay as they are.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

Named = tuple[str, torch.Tensor]
_ALIGNMENT = 16  # bytes: a shard of any dtype can be cut out where it begins


def gathered(buckets: Iterable[list[tuple[str, Any]]], device: torch.device) -> Iterator[Named]:
    """The whole tensors of each bucket's parameters, in order. A collective: every rank must iterate over all of them.

    Two buckets are in memory, and a tensor. Tensors that are already whole are yielded as they are.
    """
    coming: deque[_Gathering] = deque()
    for bucket in buckets:
        coming.append(_Gathering(bucket, device))
        if len(coming) == 2:
            yield from coming.popleft().tensors()  # no reference here keeps its memory
    while coming:
        yield from coming.popleft().tensors()


class _Gathering:
    """A bucket, in flight once constructed."""

    def __init__(self, bucket: list[tuple[str, Any]], device: torch.device) -> None:
        self._bucket = [(name, parameter, _here(parameter, device)) for name, parameter in bucket]
        self._work: Any = None
        away = [parameter for _, parameter, here in self._bucket if here is None]
        if away:
            (group,) = {parameter.ds_process_group for parameter in away}
            packed = _packed([parameter.ds_tensor for parameter in away], device)
            flat = packed.new_empty(dist.get_world_size(group) * len(packed))
            self._work = dist.all_gather_into_tensor(flat, packed, group=group, async_op=True)
            self._of_ranks = flat.view(-1, len(packed))
            self._packed = packed  # until it is sent

    def tensors(self) -> Iterator[Named]:
        if self._work is not None:
            self._work.wait()
            del self._packed
        begin = 0
        for name, parameter, here in self._bucket:
            if here is None:
                size = parameter.ds_tensor.nbytes
                flat = self._of_ranks[:, begin : begin + size].reshape(-1).view(parameter.ds_tensor.dtype)
                here = flat[: parameter.ds_numel].view(parameter.ds_shape)
                begin += _aligned(size)
            yield name, here


def _here(parameter: Any, device: torch.device) -> torch.Tensor | None:
    """The whole parameter if this rank has it: it persists, was never sharded, or there is no other rank."""
    if not hasattr(parameter, "ds_tensor") or parameter.ds_status.name == "AVAILABLE":
        whole: torch.Tensor = parameter.data
        return whole
    if dist.get_world_size(parameter.ds_process_group) > 1:
        return None
    flat: torch.Tensor = parameter.ds_tensor.to(device)
    return flat[: parameter.ds_numel].view(parameter.ds_shape)


def _packed(shards: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """uint8, in order."""
    packed = torch.empty(sum(_aligned(shard.nbytes) for shard in shards), dtype=torch.uint8, device=device)
    begin, places = 0, []
    for shard in shards:
        places.append(packed[begin : begin + shard.nbytes])
        begin += _aligned(shard.nbytes)
    torch._foreach_copy_(places, [shard.view(torch.uint8) for shard in shards])
    return packed


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
