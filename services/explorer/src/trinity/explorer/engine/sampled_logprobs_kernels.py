"""sampled_logprobs in Triton: log sum exp in parts of a row, then one small program a row that joins them."""

import torch
import triton
import triton.language as tl

_PART = 8192  # logits that one program reads


def of_rows(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [B, 1]. logits [B, V] of any float dtype, rows contiguous; token_ids [B]. Waits for no GPU."""
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, _PART)
    greatest = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    sums, found = torch.empty_like(greatest), greatest.new_empty((rows, 1))
    if rows:
        _part_kernel[(rows, parts)](logits, logits.stride(0), vocabulary, greatest, sums, parts, SIZE=_PART)
        padded = triton.next_power_of_2(parts)
        _join_kernel[(rows,)](logits, logits.stride(0), token_ids, greatest, sums, parts, found, SIZE=padded)
    return found


@triton.jit
def _part_kernel(logits, stride, vocabulary, greatest, sums, parts, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reduce one part of a row to its greatest logit m and the sum of exp(logit - m). All logits may be -inf."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * SIZE + tl.arange(0, SIZE)
    values = tl.load(logits + row * stride + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
    most = tl.max(values)
    most = tl.where(most == float("-inf"), 0.0, most)
    tl.store(greatest + row * parts + part, most)
    tl.store(sums + row * parts + part, tl.sum(tl.exp(values - most)))


@triton.jit
def _join_kernel(logits, stride, token_ids, greatest, sums, parts, found, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Subtract the logarithm of a row's whole sum from the sampled token's logit."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SIZE)
    mine = row * parts + part
    most = tl.load(greatest + mine, mask=part < parts, other=float("-inf"))
    some = tl.load(sums + mine, mask=part < parts, other=0.0)
    top = tl.max(tl.where(some > 0.0, most, float("-inf")))
    total = tl.sum(tl.where(some > 0.0, some * tl.exp(most - top), 0.0))
    logit = tl.load(logits + row * stride + tl.load(token_ids + row)).to(tl.float32)
    tl.store(found + row, (logit - top) - tl.log(total))
