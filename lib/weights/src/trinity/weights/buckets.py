"""How a version travels through a collective group: tensors packed, in order, into buckets. Both sides agree.

Pure Python; the group itself is in collective.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trinity.weights.manifest import TensorInfo

_ALIGNMENT = 16


@dataclass(frozen=True)
class Slot:
    """A tensor's place in its bucket, in bytes."""

    tensor: TensorInfo
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel in one broadcast. size_bytes includes the padding between them."""

    slots: tuple[Slot, ...]
    size_bytes: int


def plan_buckets(tensors: Sequence[TensorInfo], bucket_bytes: int) -> list[Bucket]:
    """Tensors in their order; a bucket ends before the tensor that would make it larger than `bucket_bytes`.

    A tensor that is larger by itself has a bucket of its own. Offsets are multiples of 16 bytes.
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    size = 0
    for tensor in tensors:
        if slots and size + tensor.size_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(slots), size))
            slots, size = [], 0
        slots.append(Slot(tensor, size))
        size += -(-tensor.size_bytes // _ALIGNMENT) * _ALIGNMENT
    if slots:
        buckets.append(Bucket(tuple(slots), size))
    return buckets
