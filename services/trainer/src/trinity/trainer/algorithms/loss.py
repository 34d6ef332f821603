"""The whole loss of a micro-batch: policy term + KL term - entropy term, each aggregated over the global batch."""

from dataclasses import dataclass

import torch

from trinity.config.algorithms import AlgorithmPlan
from trinity.trainer.algorithms.aggregation import Totals, aggregate
from trinity.trainer.algorithms.kl import KL
from trinity.trainer.algorithms.policy_losses import POLICY_LOSSES, aggregation_of
from trinity.trainer.algorithms.report import Report, masked_sum


@dataclass(frozen=True)
class LossInputs:
    """Response-aligned tensors of one micro-batch, [B, R] float32. The optional ones are those the algorithm needs."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    mask: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    reference_logprobs: torch.Tensor | None = None


def compute_loss(plan: AlgorithmPlan, inputs: LossInputs, totals: Totals) -> tuple[torch.Tensor, Report]:
    """This micro-batch's share of the batch's loss (a scalar), and its report."""
    name, args = plan.policy_loss.name, plan.policy_loss.args
    mode = aggregation_of(name, args, plan.loss_aggregation)
    mask = inputs.mask
    token_loss, report = POLICY_LOSSES[name](inputs.logprobs, inputs.old_logprobs, inputs.advantages, mask, **args)
    loss = aggregate(token_loss, mask, mode, totals)
    report["entropy"] = masked_sum(inputs.entropy.detach(), mask)
    if not plan.offline:
        report["pg_loss"] = masked_sum(token_loss.detach(), mask)
        report["rollout_logprob_diff"] = masked_sum((inputs.logprobs - inputs.old_logprobs).detach().abs(), mask)
    if plan.needs_reference:
        assert inputs.reference_logprobs is not None
        kl = KL[plan.kl_loss.name](inputs.logprobs, inputs.reference_logprobs)
        loss = loss + plan.kl_loss.args["kl_coef"] * aggregate(kl, mask, mode, totals)
        report["kl_loss"] = masked_sum(kl.detach(), mask)
    coefficient = plan.entropy_loss.args.get("entropy_coef", 0.0)
    if coefficient:
        loss = loss - coefficient * aggregate(inputs.entropy, mask, mode, totals)
    return loss, report


def wants_entropy_gradient(plan: AlgorithmPlan) -> bool:
    return bool(plan.entropy_loss.args.get("entropy_coef", 0.0))
