"""numpy arrays on the wire: dtype + shape + bytes, checked on the way in (invariant I9)."""

import math

import numpy as np

from trinity.api.common.v1 import tensor_pb2
from trinity.runtime.errors import InvalidInput

_DTYPES = {name: np.dtype(name) for name in ("int32", "int64", "float32", "float64", "bool")}


def to_tensor(array: np.ndarray) -> tensor_pb2.Tensor:
    """A Tensor with the array's own dtype, which must be one of int32, int64, float32, float64, bool."""
    tensor = tensor_pb2.Tensor()
    fill_tensor(tensor, array)
    return tensor


def fill_tensor(tensor: tensor_pb2.Tensor, array: np.ndarray) -> None:
    """As `to_tensor`, into a message that is there."""
    name = array.dtype.name
    if name not in _DTYPES:
        raise TypeError(f"dtype {name} cannot be sent; use one of {', '.join(_DTYPES)}")
    tensor.dtype = name
    tensor.shape.extend(array.shape)
    tensor.data = array.tobytes()


def from_tensor(tensor: tensor_pb2.Tensor, field: str, dtype: str, ndim: int = 1) -> np.ndarray:
    """The array of a Tensor (read-only, no copy). InvalidInput naming `field` unless it is of `dtype` and `ndim`."""
    if tensor.dtype != dtype:
        raise InvalidInput(f"{field}.dtype", f"is {tensor.dtype!r}, must be {dtype!r}")
    shape = tuple(tensor.shape)
    if len(shape) != ndim or any(size < 0 for size in shape):
        raise InvalidInput(f"{field}.shape", f"is {list(shape)}, must have {ndim} dimension(s) of size >= 0")
    expected = math.prod(shape) * _DTYPES[dtype].itemsize
    if len(tensor.data) != expected:
        raise InvalidInput(f"{field}.data", f"has {len(tensor.data)} bytes; {dtype}{list(shape)} needs {expected}")
    return np.frombuffer(tensor.data, dtype=_DTYPES[dtype]).reshape(shape)
