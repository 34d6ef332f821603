"""The whole loss of a micro-batch: policy term + KL term - entropy term, each aggregated over the global batch."""

from dataclasses import replace

import torch

from trinity.config.algorithm_parts import EXPERT_LOSSES
from trinity.config.algorithms import AlgorithmPlan
from trinity.trainer.algorithms.aggregation import Share, Totals
from trinity.trainer.algorithms.correction import correct
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.kl import KL
from trinity.trainer.algorithms.mismatch import mismatch
from trinity.trainer.algorithms.policy_losses import POLICY_LOSSES
from trinity.trainer.algorithms.report import Report, masked_sum

__all__ = ["LossInputs", "compute_loss", "wants_entropy_gradient"]


def compute_loss(
    plan: AlgorithmPlan, inputs: LossInputs, totals: Totals, kl_coef: float | None = None
) -> tuple[torch.Tensor, Report]:
    """This micro-batch's share of the batch's loss (a scalar), and its report. kl_coef: in place of the plan's.

    Expert rows have neither reward nor behaviour policy: only losses with an expert term receive them.
    """
    if plan.policy_loss.name not in EXPERT_LOSSES:
        inputs, totals = replace(inputs, mask=inputs.mask * (1 - inputs.expert)), totals.rolled_out or totals
    x = inputs.only_masked()
    share = Share(plan.loss_aggregation, totals, max_response_tokens=plan.max_response_tokens)
    corrected, weights, about = correct(x, plan.correction)
    loss, report = POLICY_LOSSES[plan.policy_loss.name](
        corrected, replace(share, weights=weights), **plan.policy_loss.args
    )
    report |= about
    report["entropy"] = masked_sum(x.entropy.detach(), x.mask)
    if not plan.offline:
        # Shares add up to the loss: the weights are such that their mean is their sum.
        report["pg_loss"] = torch.stack([loss.detach() * max(totals.tokens, 1), x.mask.sum()]).float()
        report |= mismatch(x)
    if plan.kl_in_loss:
        assert x.reference_logprobs is not None
        kl = KL[plan.kl_loss.name](x.logprobs, x.reference_logprobs, _sampler(plan, x))
        loss = loss + (plan.kl_loss.args["kl_coef"] if kl_coef is None else kl_coef) * share(kl, x.mask)
        report["kl_loss"] = masked_sum(kl.detach(), x.mask)
    coefficient = plan.entropy_loss.args.get("entropy_coef", 0.0)
    if coefficient:
        loss = loss - coefficient * _entropy(plan.entropy_loss.name, x, share)
    return loss, report


def _sampler(plan: AlgorithmPlan, x: LossInputs) -> torch.Tensor:
    """Log-probabilities under the behaviour policy, [B, R]; for rows of datasets the policy's own."""
    return x.logprobs if plan.offline else torch.where(x.expert > 0, x.logprobs, x.old_logprobs)


def _entropy(name: str, x: LossInputs, share: Share) -> torch.Tensor:
    """default: of all sequences; mix: of the rolled-out ones alone, as a mean over these."""
    if name == "mix":
        return share.among(share.totals.rolled_out)(x.entropy, x.mask * (1 - x.expert))
    return share(x.entropy, x.mask)


def wants_entropy_gradient(plan: AlgorithmPlan) -> bool:
    return bool(plan.entropy_loss.args.get("entropy_coef", 0.0))
