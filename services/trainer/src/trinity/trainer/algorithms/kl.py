"""KL estimators between the policy and the reference, per token. Schulman, http://joschu.net/blog/kl-approx.html.

lp, ref, old: log-probabilities of the sampled token under policy, reference and the policy that sampled, any shape;
d = ref - lp.
"""

from dataclasses import dataclass

import torch

from trinity.config.algorithms import AlgorithmPlan, Part
from trinity.plugins import kl_function
from trinity.plugins.declarations import KL_FUNCTIONS


def estimate(part: Part, lp: torch.Tensor, ref: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Returns the KL of each token by the part's function."""
    found: torch.Tensor = KL_FUNCTIONS[part.name](lp, ref, old, **part.args_beside(KL_FUNCTIONS.args))
    return found


@kl_function("k1")
def k1(lp: torch.Tensor, ref: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """-d. Unbiased, may be negative."""
    return lp - ref


@kl_function("k2")
def k2(lp: torch.Tensor, ref: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """d^2 / 2. Biased, low variance; its gradient is that of the reverse KL."""
    return 0.5 * (lp - ref).square()


@kl_function("k3")
def k3(lp: torch.Tensor, ref: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d. Unbiased, never negative."""
    d = ref - lp
    return d.exp() - 1 - d


@kl_function("low_var_kl")
def low_var_kl(lp: torch.Tensor, ref: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """k3 with d clamped to +-20 and the result to +-10."""
    d = (ref - lp).clamp(-20, 20)
    return (d.exp() - 1 - d).clamp(-10, 10)


@kl_function("abs")
def absolute(lp: torch.Tensor, ref: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """|d|."""
    return (lp - ref).abs()


@kl_function("corrected_k3", source="DeepSeek-V3.2, arXiv:2512.02556, 3.1, without the cap")
def corrected_k3(lp: torch.Tensor, ref: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """min(exp(lp - old), 2) k3, the ratio differentiated too.

    Without the cap, value and gradient are unbiased for tokens that other weights sampled, as there. The cap is
    Trinity-RFT's: where a ratio is above 2 it bounds the variance, and the estimate is too low.
    """
    return (lp - old).clamp(max=20).exp().clamp(max=2.0) * k3(lp, ref, old)


@dataclass(frozen=True)
class KlCoefficients:
    """Coefficients of the loss's KL and of the reward's KL in the next step. Stored in checkpoints."""

    loss: float
    reward: float

    @classmethod
    def of(cls, plan: AlgorithmPlan) -> "KlCoefficients":
        """Takes the coefficients of the YAML."""
        return cls(plan.kl_loss.args.get("kl_coef", 0.0), plan.kl_penalty.args.get("kl_coef", 0.0))

    def after(
        self, plan: AlgorithmPlan, loss_kl: float | None, reward_kl: float | None, sequences: int
    ) -> "KlCoefficients":
        """Returns the coefficients after a step with this mean KL in loss and reward; None keeps a coefficient."""
        return KlCoefficients(
            adapted(self.loss, plan.kl_loss, loss_kl, sequences),
            adapted(self.reward, plan.kl_penalty, reward_kl, sequences),
        )


def adapted(coefficient: float, part: Part, kl: float | None, sequences: int) -> float:
    """coefficient (1 + clip(kl / target - 1, +-0.2) sequences / horizon) if adaptive. arXiv:1909.08593, section 2.2."""
    if not part.args.get("adaptive") or kl is None:
        return coefficient
    error = min(max(kl / part.args["target_kl"] - 1, -0.2), 0.2)
    return coefficient * (1 + error * sequences / part.args["horizon"])
