"""KL estimators between the policy and the reference, per token. Schulman, http://joschu.net/blog/kl-approx.html.

lp, ref: log-probabilities of the sampled token under policy and reference, any shape; d = ref - lp.
"""

from collections.abc import Callable

import torch

KlFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def k1(lp: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """-d: unbiased, may be negative."""
    return lp - ref


def k2(lp: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased, low variance; its gradient is that of the reverse KL."""
    return 0.5 * (lp - ref).square()


def k3(lp: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d: unbiased, never negative."""
    d = ref - lp
    return d.exp() - 1 - d


def low_var_kl(lp: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """k3 with d clamped to +-20 and the result to +-10."""
    d = (ref - lp).clamp(-20, 20)
    return (d.exp() - 1 - d).clamp(-10, 10)


def absolute(lp: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """|d|."""
    return (lp - ref).abs()


KL: dict[str, KlFn] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl, "abs": absolute}
