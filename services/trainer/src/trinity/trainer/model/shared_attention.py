"""Attention to prefixes that several segments of a packed row share (data.shared_prefixes).

GPUs run a kernel for each segment with itself, and once for each level of the trees: for all tokens below a shared
segment with this segment. The results are joined by the log-sum-exp of their scores, as FlashAttention joins blocks
(arXiv:2307.08691, section 2.3.1). The backward pass of each call receives the joined output and log-sum-exp, from which
it computes its part of the gradients.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import structlog
import torch
from torch.nn.functional import scaled_dot_product_attention

from trinity.trainer.data.shared_prefixes import Level, Segment, SharedPrefixes, lay_out, path_to
from trinity.trainer.model.varlen import difference, flash_attention_4, kernel_for

log = structlog.get_logger(__name__)

# Two trees, one of depth three, whose segments of a level are not all end to end.
_TRIAL = (
    Segment(0, 130, below=(
        Segment(130, 133),
        Segment(130, 200, below=(Segment(200, 400), Segment(200, 240, below=(Segment(240, 245), Segment(240, 330))))),
    )),
    Segment(0, 20, below=(Segment(20, 90, below=(Segment(90, 91), Segment(90, 220))), Segment(20, 30))),
)  # fmt: skip


@dataclass(frozen=True)
class Ends:
    """Parts of a call's queries and keys: starts and the end of the last, int32 [parts + 1]; the longest length."""

    q: torch.Tensor
    k: torch.Tensor
    longest_q: int
    longest_k: int
    causal: bool


@dataclass(frozen=True)
class Kernel:
    """attend: q [T, heads, width], k and v [S, key heads, width] -> the output, and the log-sum-exp [heads, T] of the
    scores. gradients: gradient of the output, q, k, v, output and log-sum-exp -> gradients of q, k and v."""

    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gradients: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def attend_to_shared(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int, shared: SharedPrefixes,
    scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """q [T, heads, width], k and v [T, key heads, width] -> [T, heads, width], on a GPU. ends: of the segments."""
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    kernel = _kernel(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], kernel_for(q, k, None) is flash_attention_4)
    if kernel is None:
        lengths = tuple(ends.diff().tolist())
        return one_by_one(q[None], k[None], v[None], lengths, scaling, 0.0, None, shared.parents)[0]
    joined: torch.Tensor = _Joined.apply(kernel, q, k, v, Ends(ends, ends, longest, longest, True), shared, scaling)
    return joined


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: Ends, shared: SharedPrefixes,
        scaling: float,
    ) -> torch.Tensor:  # fmt: skip
        output, lse = kernel.attend(q, k, v, own, scaling)
        for level in shared.levels:
            readers, read = level.readers, level.read
            above, its_lse = kernel.attend(q[readers], k[read], v[read], _to_shared(level), scaling)
            output_of, lse_of = output[readers], lse[:, readers]
            share = torch.sigmoid(its_lse - lse_of).T[..., None]  # weight of the shared segment
            share = share.to(torch.promote_types(output.dtype, torch.float32))
            output[readers] = torch.lerp(output_of.to(share.dtype), above.to(share.dtype), share).to(output.dtype)
            lse[:, readers] = torch.logaddexp(lse_of, its_lse)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.of_call = kernel, own, shared, scaling
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, output, lse = ctx.saved_tensors
        kernel, own, shared, scaling = ctx.of_call
        of_output = gradients[0].contiguous()
        dq, dk, dv = kernel.gradients(of_output, q, k, v, output, lse, own, scaling)
        for level in shared.levels:
            readers, read = level.readers, level.read
            others = kernel.gradients(
                of_output[readers], q[readers], k[read], v[read], output[readers], lse[:, readers].contiguous(),
                _to_shared(level), scaling,
            )  # fmt: skip
            for whole, places, part in zip((dq, dk, dv), (readers, read, read), others, strict=True):
                whole[places] += part
        return None, dq, dk, dv, None, None, None


def _to_shared(level: Level) -> Ends:
    return Ends(level.reader_ends, level.read_ends, level.most_readers, level.longest, causal=False)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Ends, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, ends.q, ends.k, ends.longest_q, ends.longest_k, 0.0, ends.causal, False, scale=scaling
    )
    return output, lse


def _gradients(
    of_output: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, lse: torch.Tensor,
    ends: Ends, scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten._flash_attention_backward(
        of_output, q, k, v, output, lse, ends.q, ends.k, ends.longest_q, ends.longest_k, 0.0, ends.causal, state,
        unused, scale=scaling,
    )  # fmt: skip
    return found


def _attend_by_4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Ends, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    output, lse = _flash_attn_fwd(q, k, v, softmax_scale=scaling, causal=ends.causal, return_lse=True, **_for_4(ends))
    return output, lse


def _gradients_by_4(
    of_output: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, lse: torch.Tensor,
    ends: Ends, scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd

    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _flash_attn_bwd(
        q, k, v, output, of_output, lse, softmax_scale=scaling, causal=ends.causal,
        deterministic=torch.are_deterministic_algorithms_enabled(), **_for_4(ends),
    )  # fmt: skip
    return found


def _for_4(ends: Ends) -> dict[str, Any]:
    lengths = {"max_seqlen_q": ends.longest_q, "max_seqlen_k": ends.longest_k}
    return {"cu_seqlens_q": ends.q, "cu_seqlens_k": ends.k, **lengths}


PYTORCH, FLASH_ATTENTION_4 = Kernel(_attend, _gradients), Kernel(_attend_by_4, _gradients_by_4)


@cache
def _kernel(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, try_4: bool
) -> Kernel | None:
    """Returns the fastest kernel that agrees with `one_by_one` for these heads; None, with a warning, if none does."""
    reasons: dict[str, str] = {}
    kernels = {"FlashAttention 4": FLASH_ATTENTION_4, "PyTorch": PYTORCH}
    with ThreadPoolExecutor(1) as apart:  # hides the trial's saved tensors from activation checkpointing
        for name, kernel in kernels.items() if try_4 else [("PyTorch", PYTORCH)]:
            wrong = apart.submit(_what_is_wrong, kernel, device, dtype, heads, key_heads, width).result()
            if wrong is None:
                log.info("trainer.attention.kernel_of_shared_prefixes", kernel=name, not_by=reasons)
                return kernel
            reasons[name] = wrong
    log.warning("trainer.attention.no_kernel_of_shared_prefixes", reasons=reasons, heads=heads, width=width)
    return None


def _what_is_wrong(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int
) -> str | None:
    generator = torch.Generator(device).manual_seed(0)
    lengths, shared, _ = lay_out(_TRIAL)
    assert shared is not None

    def numbers(count: int) -> torch.Tensor:
        shape = sum(lengths), count, width
        return torch.randn(shape, device=device, generator=generator).to(dtype).requires_grad_()

    q, k, v = numbers(heads), numbers(key_heads), numbers(key_heads)
    weights = numbers(heads).detach()
    scaling, on_device = width**-0.5, shared.to(device)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    own = Ends(ends, ends, max(lengths), max(lengths), causal=True)
    try:
        with torch.cuda.device_of(q), torch.enable_grad():
            right = one_by_one(q[None], k[None], v[None], lengths, scaling, 0.0, None, shared.parents)[0]
            expected = [right, *torch.autograd.grad(right, (q, k, v), weights)]
            found = _Joined.apply(kernel, q, k, v, own, on_device, scaling)
            results = [found, *torch.autograd.grad(found, (q, k, v), weights)]
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernel
    except Exception as error:  # of this version of PyTorch, or for this GPU
        return f"{type(error).__name__}: {error}"[:300]
    return difference(("output", "dq", "dk", "dv"), results, expected)


def one_by_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[int, ...],
    scaling: float | None,
    dropout: float,
    window: int | None,
    parents: tuple[int | None, ...] | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs one scaled_dot_product_attention for each segment of q, k, v [1, T, heads, width].

    parents: of SharedPrefixes: a segment attends to all on its path too. window: a token attends to this many
    tokens including itself. cap: bounds scores by cap * tanh(score / cap). sinks [heads]: the score of a key without a
    value. With either, memory holds the scores of a segment.
    """
    parts = []
    segments = [tensor.transpose(1, 2).split(lengths, dim=2) for tensor in (q, k, v)]
    for index, one_q in enumerate(segments[0]):
        path = path_to(index, parents)
        one_k, one_v = (of[index] if len(path) == 1 else torch.cat([of[one] for one in path], 2) for of in segments[1:])
        before = sum(lengths[one] for one in path[:-1])
        mask = _band(one_q.shape[2], before, window, q.device)
        if cap is not None or sinks is not None:
            parts.append(_by_scores(one_q, one_k, one_v, mask, scaling, cap, sinks))
            continue
        part = scaled_dot_product_attention(
            one_q, one_k, one_v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling,
            enable_gqa=one_q.shape[1] != one_k.shape[1],
        )  # fmt: skip
        parts.append(part)
    return torch.cat(parts, dim=2).transpose(1, 2)


def _by_scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float | None,
    cap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """q [1, heads, T, width], k and v [1, key heads, S, width] -> [1, heads, T, width]. mask: see `_band`."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scaling is None else scaling)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril() if mask is None else mask
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=3)
    return scores.softmax(dim=3)[..., : k.shape[2]].to(v.dtype) @ v


def _band(length: int, before: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Returns the attention mask of `length` tokens after `before` other tokens, bool [length, before + length].

    Returns None for plain causal attention.
    """
    within = window is None or before + length <= window
    if within and not before:
        return None
    every = torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)
    return every if within else every.triu(before + 1 - window)  # type: ignore[operator]
