"""Matrices in four bits: NF4 with double quantization (Dettmers et al., QLoRA, arXiv:2305.14314, section 3).

    W ~ q(codes) * absmax,   absmax ~ d(8-bit codes) * absmax2 + mean

Each block of 64 elements in a row of memory has one absmax, each block of 256 of these another one. bitsandbytes
computes it. The trainer holds `codes`, 4.13 bits an element; engines, merged models and `trinity convert` hold the same
values at full width (`rounded`), so all of them compute with one base model.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from trinity.runtime.errors import InvalidInput

if TYPE_CHECKING:
    import torch

MARK = "base"  # in the metadata of adapters' files: the base that they were trained on
NF4 = "nf4"
_BLOCK, _BLOCK_OF_BLOCKS = 64, 256


def quantize(matrix: "torch.Tensor") -> "tuple[torch.Tensor, Any]":
    """Returns the codes, uint8 [ceil(elements / 2), 1], and bitsandbytes' QuantState of a float32 or bfloat16 matrix.

    bitsandbytes sums the mean of the maxima in float32, whose last bits depend on the number of threads. Here it is
    summed in float64, so that every process finds the same codes.
    """
    bitsandbytes = _import()
    codes, state = bitsandbytes.quantize_4bit(matrix.contiguous(), blocksize=_BLOCK, quant_type=NF4)
    mean = state.absmax.double().mean().float()
    state.absmax, state.state2 = bitsandbytes.quantize_blockwise(state.absmax - mean, blocksize=_BLOCK_OF_BLOCKS)
    state.offset, state.nested = mean, True
    return codes, state


def dequantize(codes: "torch.Tensor", state: Any) -> "torch.Tensor":
    """Returns the matrix of the codes, in the shape and dtype of the quantized one."""
    found: torch.Tensor = _import().dequantize_4bit(codes, state)
    return found


def rounded(matrix: "torch.Tensor") -> "torch.Tensor":
    """Returns a matrix with the values that its four bits stand for."""
    return dequantize(*quantize(matrix))


def rounded_base(
    base: "Iterable[tuple[str, torch.Tensor]]",
    is_held: Callable[[str, tuple[int, ...]], bool],
    dtype: "torch.dtype",
    device: Any = "cpu",
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yields the tensors of a base model. A tensor that the trainer holds in four bits is rounded on `device`.

    is_held: of a tensor's name and shape (checks.lora.in_four_bits). dtype: what the trainer computes in.
    """
    for name, tensor in base:
        yield name, rounded(tensor.to(device, dtype)) if is_held(name, tuple(tensor.shape)) else tensor


def _import() -> Any:
    try:
        import bitsandbytes.functional
    except ImportError:
        what = "is true, which needs bitsandbytes; `pip install -e '.[bitsandbytes]'`"
        raise InvalidInput("model.lora_configs.0.load_in_4bit", what) from None
    return bitsandbytes.functional
