"""Log-probabilities and entropy from hidden states, a few tokens' logits at a time.

The logits of a batch are by far the largest tensor of training: 16k tokens of a 152k vocabulary take 9.3 GiB in
float32, and as much again for the gradient. Here only `chunk` tokens' logits ever exist; the backward pass computes
them anew.
"""

from typing import Any

import torch


class _ChunkedHead(torch.autograd.Function):
    """hidden [N, H], weight [V, H], targets [N], scale [N] -> logprobs [N], entropy [N], both float32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: torch.Tensor,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = [], []
        for at in range(0, len(hidden), chunk):
            part = slice(at, at + chunk)
            logs = _log_softmax(hidden[part], weight, scale[part])
            logprobs.append(logs.gather(1, targets[part, None])[:, 0])
            entropy.append(-(logs.exp() * logs).sum(-1))
        ctx.save_for_backward(hidden, weight, targets, scale)
        ctx.chunk = chunk
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return (torch.cat(logprobs) if logprobs else empty), (torch.cat(entropy) if entropy else empty.clone())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, targets, scale = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for at in range(0, len(hidden), ctx.chunk):
            part = slice(at, at + ctx.chunk)
            logs = _log_softmax(hidden[part], weight, scale[part])
            probs = logs.exp()
            # d logp(target) = onehot - p;  d entropy = -p (log p + entropy)
            grad = -probs * grad_logprobs[part, None]
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            if grad_entropy is not None and grad_entropy.any():
                entropy = -(probs * logs).sum(-1, keepdim=True)
                grad -= probs * (logs + entropy) * grad_entropy[part, None]
            grad = (grad * scale[part, None]).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += (grad.T @ hidden[part]).float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax((hidden @ weight.T).float() * scale[:, None], dim=-1)


def chunked_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution, softmax(hidden @ weight.T / temperature).

    hidden [N, H]; weight [V, H]; targets int64 [N]; temperatures float32 [N], > 0. Both results float32 [N], with
    gradients to hidden and weight. At most [chunk, V] float32 logits exist at a time.
    """
    logprobs, entropy = _ChunkedHead.apply(hidden, weight, targets, temperatures.reciprocal(), chunk)
    return logprobs, entropy
