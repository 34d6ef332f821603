"""Computes log-probabilities and entropy from hidden states, one slice of the vocabulary at a time.

The logits of a batch are by far the largest tensor of training: 16k tokens of a 152k vocabulary take 9.3 GiB in
float32, and as much again for the gradient. Here at most `chunk` x vocabulary logits exist at a time: those of all
tokens for one slice of the vocabulary. The forward pass keeps a running maximum and sum over the slices. The backward
pass recomputes each slice and finishes its rows of the weight's gradient, so that these need no float32 copy.
"""

from collections.abc import Iterator
from typing import Any

import torch

from trinity.trainer.model.kernels import Kernel

_LOWEST = -1e30  # for -inf, whose difference from itself is not 0
_OF_ROWS = dict.fromkeys(range(8), 0)  # in arguments of kernels the number of tokens comes first


class _ChunkedHead(torch.autograd.Function):
    """hidden [N, H], weight [V, H], targets [N], scale [N] -> logprobs [N], entropy [N], both float32.

    others [N, k]: further tokens, whose log-probabilities are the third result; None: there is no third.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: torch.Tensor,
        chunk: int,
        in_float32: bool,
        fused: bool,
        cap: float | None,
        others: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.chunk, ctx.in_float32, ctx.fused, ctx.cap = chunk, in_float32, fused, cap
        largest = torch.full_like(scale, _LOWEST)
        total, mean, chosen = torch.zeros_like(scale), torch.zeros_like(scale), torch.zeros_like(scale)
        others_chosen = None if others is None else scale.new_zeros(others.shape)
        for part in _slices(len(hidden), weight, chunk):
            logits = _logits(hidden, weight[part], in_float32, cap)
            if others is not None and others_chosen is not None:
                here, where = _in_slice(others, part)
                others_chosen += torch.where(here, logits.gather(1, where) * scale[:, None], 0)
            here, where = _in_slice(targets[:, None], part)
            fold = _kernel(_FUSED_FOLDS, part, weight) if fused else _fold
            largest, total, mean, chosen = fold(logits, scale, here[:, 0], where, largest, total, mean, chosen)
            del logits  # before the next ones are computed
        entropy = total.log() - mean / total
        normaliser = largest + total.log()
        ctx.save_for_backward(hidden, weight, targets, scale, normaliser, entropy, others)
        if others_chosen is None:
            return chosen - normaliser, entropy
        return chosen - normaliser, entropy, others_chosen - normaliser[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        grad_logprobs, grad_entropy, grad_others = grads if len(grads) == 3 else (*grads, None)
        hidden, weight, targets, scale, normaliser, entropy, others = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(scale)
        # In d logp = onehot - p every token has the same p.
        of_all = grad_logprobs if grad_others is None else grad_logprobs + grad_others.sum(1)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for part in _slices(len(hidden), weight, ctx.chunk):
            logits = _logits(hidden, weight[part], ctx.in_float32, ctx.cap)
            capped = None if ctx.cap is None else (1 - (logits / ctx.cap).square()).to(hidden.dtype)
            here, where = _in_slice(targets[:, None], part)
            slope = _kernel(_FUSED_SLOPES, part, weight) if ctx.fused else _slope
            if grad_others is None:
                first, dtype = here[:, 0], hidden.dtype
            else:
                first, dtype = torch.zeros_like(here[:, 0]), torch.float32
            grad = slope(logits, scale, first, where, normaliser, entropy, of_all, grad_entropy, dtype)
            del logits
            if grad_others is not None:  # twice, as a token may be the target too: then a row has no token twice
                grad.scatter_add_(1, where, torch.where(here, grad_logprobs[:, None], 0) * scale[:, None])
                here, where = _in_slice(others, part)
                grad.scatter_add_(1, where, torch.where(here, grad_others, 0) * scale[:, None])
                grad = grad.to(hidden.dtype)
            if capped is not None:  # d tanh(x) = 1 - tanh(x)^2
                grad.mul_(capped)
            grad_hidden += grad @ weight[part]
            if grad_weight is not None:
                grad_weight[part] = grad.T @ hidden
            del grad
        return grad_hidden.to(hidden.dtype), grad_weight, *[None] * 7


def _fold(
    logits: torch.Tensor, scale: torch.Tensor, here: torch.Tensor, where: torch.Tensor,
    largest: torch.Tensor, total: torch.Tensor, mean: torch.Tensor, chosen: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Updates the last four arguments, running values of earlier slices, with one slice; overwrites its logits."""
    logits.mul_(scale[:, None])
    chosen = chosen + torch.where(here, logits.gather(1, where)[:, 0], 0)
    new = torch.maximum(largest, logits.amax(-1))
    shrink = (largest - new).exp()
    mean = shrink * (mean + (largest - new) * total)
    logits -= new[:, None]
    weights = logits.exp()
    total = shrink * total + weights.sum(-1)
    return new, total, mean + logits.mul_(weights).sum(-1), chosen  # mean: of logits less the largest, times `total`


def _fused_fold(
    logits: torch.Tensor, scale: torch.Tensor, here: torch.Tensor, where: torch.Tensor,
    largest: torch.Tensor, total: torch.Tensor, mean: torch.Tensor, chosen: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Computes the same without writing intermediate tensors."""
    scaled = logits * scale[:, None]
    chosen = chosen + torch.where(here, scaled.gather(1, where)[:, 0], 0)
    new = torch.maximum(largest, scaled.amax(-1))
    lower = scaled - new[:, None]
    weights = lower.exp()
    shrink = (largest - new).exp()
    mean = shrink * (mean + (largest - new) * total) + (lower * weights).sum(-1)
    return new, shrink * total + weights.sum(-1), mean, chosen


def _slope(
    logits: torch.Tensor, scale: torch.Tensor, here: torch.Tensor, where: torch.Tensor, normaliser: torch.Tensor,
    entropy: torch.Tensor, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor | None, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Returns the gradient of a slice's unscaled logits, [N, rows] in `dtype`; overwrites the logits."""
    logs = logits.mul_(scale[:, None]).sub_(normaliser[:, None])
    # d logp(target) = onehot - p;  d entropy = -p (log p + entropy)
    if grad_entropy is None:
        grad = logs.exp_().mul_(-grad_logprobs[:, None])
    else:
        grad = logs.exp()
        factor = logs.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprobs[:, None])
        grad.mul_(factor).neg_()
    grad.scatter_add_(1, where, torch.where(here, grad_logprobs, 0)[:, None])
    return grad.mul_(scale[:, None]).to(dtype)


def _fused_slope(
    logits: torch.Tensor, scale: torch.Tensor, here: torch.Tensor, where: torch.Tensor, normaliser: torch.Tensor,
    entropy: torch.Tensor, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor | None, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Computes the same without writing intermediate tensors."""
    logs = logits * scale[:, None] - normaliser[:, None]
    factor = grad_logprobs[:, None]
    if grad_entropy is not None:
        factor = factor + (logs + entropy[:, None]) * grad_entropy[:, None]
    columns = torch.arange(logits.shape[1], device=logits.device)
    onehot = here[:, None] & (columns == where)
    grad = torch.where(onehot, grad_logprobs[:, None], 0) - logs.exp() * factor
    return (grad * scale[:, None]).to(dtype)


# Compiled for each of a few widths, up to 2.6 times as fast on an H200, and once for all other widths.
_FUSED_FOLDS = Kernel(_fused_fold, _OF_ROWS), Kernel(_fused_fold)
_FUSED_SLOPES = Kernel(_fused_slope, _OF_ROWS), Kernel(_fused_slope)


def _kernel(kernels: tuple[Kernel, Kernel], part: slice, weight: torch.Tensor) -> Kernel:
    """Selects the first kernel for the widths of `_slices`, the second for the remainder of the vocabulary."""
    width = part.stop - part.start
    return kernels[0 if width == len(weight) or width & (width - 1) == 0 else 1]


def _slices(tokens: int, weight: torch.Tensor, chunk: int) -> Iterator[slice]:
    """Yields slices of the vocabulary with tokens x slice <= chunk x vocabulary. Widths are powers of two, or all."""
    vocabulary = len(weight)
    width = max(1, chunk * vocabulary // max(tokens, 1))
    width = vocabulary if width >= vocabulary else 1 << (width.bit_length() - 1)
    for first in range(0, vocabulary, width):
        yield slice(first, min(first + width, vocabulary))


def _logits(hidden: torch.Tensor, rows: torch.Tensor, in_float32: bool, cap: float | None) -> torch.Tensor:
    """Returns hidden @ rows.T in a new tensor, float32 [N, rows]; rounded to hidden's dtype unless in_float32."""
    if not in_float32 or hidden.dtype == torch.float32:
        logits = (hidden @ rows.T).float()
    elif hidden.is_cuda:
        logits = torch.mm(hidden, rows.T, out_dtype=torch.float32)
    else:
        logits = hidden.float() @ rows.float().T
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _in_slice(tokens: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns which tokens [N, k] are in the slice, and their index in it; any index for the others."""
    here = (tokens >= part.start) & (tokens < part.stop)
    return here, torch.where(here, tokens - part.start, 0)


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    chunk: int,
    in_float32: bool = False,
    fused: bool = False,
    cap: float | None = None,
    others: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns each target's log-probability and each distribution's entropy; softmax(hidden @ weight.T / temperature).

    hidden [N, H]; weight [V, H]; targets int64 [N]; temperatures float32 [N], > 0. Both results float32 [N], with
    gradients to hidden and weight. At most chunk x V logits exist at a time. in_float32: logits are computed in
    float32 for every dtype of hidden and weight; else they are rounded to that dtype, as their gradient always is.
    fused: use compiled kernels on a GPU. cap: logits x become cap tanh(x / cap) before the temperature (Gemma 2,
    arXiv:2408.00118, section 2). others int64 [N, k]: with these tokens, which differ in a row, there is a third
    result, their log-probabilities, float32 [N, k].
    """
    scale = temperatures.reciprocal()
    found: tuple[torch.Tensor, ...] = _ChunkedHead.apply(
        hidden, weight, targets, scale, chunk, in_float32, fused, cap, others
    )
    return found
