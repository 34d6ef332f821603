"""One block of a tensor as a difference to the same block of its base: what changed and where, packed with zstandard.

A block is at most BLOCK_BYTES of a tensor, seen as unsigned integers as wide as an element. It becomes a frame of one
of four kinds, the smallest that is cheap to find:

    SAME    nothing changed; empty
    SPARSE  positions of the changed elements, as the gaps between them, and their differences
    DENSE   the difference of every element, when half of them changed
    WHOLE   the bytes as they are, when packing does not help

A difference is new - base of the two bit patterns (modulo 2^bits), with its sign folded into the lowest bit: an element
that moves by one unit in the last place is 1 or 2 at every exponent. Gaps and differences are packed byte plane by
byte plane, since the high bytes are nearly all zero. Without a base its bytes count as zeros. See delta.py for figures.
"""

import struct
from enum import IntEnum
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

BLOCK_BYTES = 1024 * 1024  # a multiple of every element's width

FRAME = struct.Struct("<BI")  # kind, length of the payload in bytes
_SPARSE = struct.Struct("<BII")  # width of a gap in bytes, changed elements, length of the packed gaps in bytes
_LEVEL = 1  # level 3 packs no better here and takes 1.5 times as long
_DENSE_SHARE = 0.5
_WORTH_PACKING = 0.98

Bytes = NDArray[np.uint8]
Elements = NDArray[Any]


class Kind(IntEnum):
    SAME = 0
    SPARSE = 1
    DENSE = 2
    WHOLE = 3


def encode(base: Bytes, new: Bytes, width: int) -> bytes:
    """The frame that makes `new` of `base`, blocks of the same length: one element or more, `width` bytes each."""
    old, elements = _elements(base, width), _elements(new, width)
    changed = old != elements
    count = int(np.count_nonzero(changed))
    if count == 0:
        return FRAME.pack(Kind.SAME, 0)
    kind, payload = Kind.DENSE, b""
    if count < _DENSE_SHARE * len(elements):
        kind, payload = Kind.SPARSE, _sparse(old, elements, np.flatnonzero(changed))
    else:
        payload = _pack(_fold(elements - old))
    if len(payload) > _WORTH_PACKING * len(new):
        kind, payload = Kind.WHOLE, new.tobytes()
    return FRAME.pack(kind, len(payload)) + payload


def decode(kind: int, payload: bytes, base: Bytes, width: int) -> Bytes:
    """What `encode` was given as `new`. ValueError if the payload cannot be one of this kind and length."""
    if kind == Kind.SAME and not payload:
        return base
    if kind == Kind.WHOLE and len(payload) == len(base):
        return np.frombuffer(payload, np.uint8)
    old = _elements(base, width)
    if kind == Kind.DENSE:
        return (old + _unfold(_unpack(payload, len(old), width))).view(np.uint8)
    if kind != Kind.SPARSE or len(payload) < _SPARSE.size:
        raise ValueError(f"a frame of kind {kind} with {len(payload)} bytes")
    gap_width, count, length = _SPARSE.unpack_from(payload)
    if gap_width not in (1, 2, 4) or not 0 < count <= len(old):
        raise ValueError(f"{count} changes with gaps of {gap_width} bytes in a block of {len(old)} elements")
    packed = payload[_SPARSE.size :]
    positions = np.cumsum(_unpack(packed[:length], count, gap_width).astype(np.int64) + 1) - 1
    if positions[-1] >= len(old):
        raise ValueError(f"a change at {positions[-1]} in a block of {len(old)} elements")
    new = old.copy()
    new[positions] += _unfold(_unpack(packed[length:], count, width))
    return new.view(np.uint8)


def _sparse(old: Elements, new: Elements, positions: NDArray[np.intp]) -> bytes:
    gaps = np.diff(positions, prepend=-1) - 1
    narrow = gaps.astype(np.min_scalar_type(int(gaps.max())))
    packed = _pack(narrow)
    head = _SPARSE.pack(narrow.itemsize, len(positions), len(packed))
    return head + packed + _pack(_fold(new[positions] - old[positions]))


def _elements(data: Bytes, width: int) -> Elements:
    return data.view(f"<u{width}")


def _fold(difference: Elements) -> Elements:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    signed = difference.view(f"<i{difference.itemsize}")
    folded: Elements = ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)
    return folded


def _unfold(folded: Elements) -> Elements:
    one = folded.dtype.type(1)
    return (folded >> one) ^ (~(folded & one) + one)


def _pack(values: Elements) -> bytes:
    planes = values.view(np.uint8).reshape(len(values), values.itemsize).T
    return zstandard.compress(planes.tobytes(), _LEVEL)


def _unpack(packed: bytes, count: int, width: int) -> Elements:
    """`count` values of `width` bytes; damaged packed bytes never yield more."""
    try:
        if zstandard.frame_content_size(packed) != count * width:
            raise ValueError("packed values of another length")
        raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=count * width)
    except zstandard.ZstdError as error:
        raise ValueError(f"packed values that are damaged: {error}") from None
    planes = np.frombuffer(raw, np.uint8).reshape(width, count)
    return np.ascontiguousarray(planes.T).reshape(-1).view(f"<u{width}")
