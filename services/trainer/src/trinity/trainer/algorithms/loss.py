"""The whole loss of a micro-batch: policy term + KL term - entropy term, each aggregated over the global batch."""

from collections.abc import Callable
from dataclasses import replace

import torch

from trinity.config.algorithms import AlgorithmPlan
from trinity.trainer.algorithms.aggregation import CLIPPED, Report, Share, Totals, masked_sum
from trinity.trainer.algorithms.correction import correct
from trinity.trainer.algorithms.entropy import mean_entropy
from trinity.trainer.algorithms.inputs import LIMIT, LossInputs
from trinity.trainer.algorithms.kl import estimate
from trinity.trainer.algorithms.policy_losses import POLICY_LOSSES

__all__ = ["LossInputs", "compute_loss", "mismatch", "wants_entropy_gradient"]


def compute_loss(
    plan: AlgorithmPlan,
    inputs: LossInputs,
    totals: Totals,
    kl_coef: float | None = None,
    record: Callable[[LossInputs, torch.Tensor | None], None] | None = None,
) -> tuple[torch.Tensor, Report]:
    """Returns this micro-batch's share of the batch's loss (a scalar), and its report. kl_coef: replaces the plan's.

    Expert rows have neither reward nor behaviour policy: only losses with an expert term receive them. `record` is
    called with the inputs and the trained tokens at which the policy loss's clip decided, bool [B, R]; None: no clip.
    """
    if not plan.trains_experts:
        inputs, totals = replace(inputs, mask=inputs.mask * (1 - inputs.expert)), totals.rolled_out or totals
    x = inputs.only_masked()
    share = Share(plan.loss_aggregation, totals, max_response_tokens=plan.max_response_tokens)
    corrected, weights, about = correct(x, plan.correction)
    loss, report = POLICY_LOSSES[plan.policy_loss.name](
        corrected, replace(share, weights=weights), **plan.policy_loss.args
    )
    clipped = report.pop(CLIPPED, None)
    if record is not None:
        record(inputs, None if clipped is None else clipped & (x.mask > 0))
    report |= about
    report["entropy"] = masked_sum(x.entropy.detach(), x.mask)
    if not plan.offline:
        # Shares add up to the loss: the weights are such that their mean is their sum.
        report["pg_loss"] = torch.stack([loss.detach() * max(totals.tokens, 1), x.mask.sum()]).float()
        report |= mismatch(x)
    if plan.kl_in_loss:
        assert x.reference_logprobs is not None
        kl = estimate(plan.kl_loss, x.logprobs, x.reference_logprobs, _sampler(plan, x))
        loss = loss + (plan.kl_loss.args["kl_coef"] if kl_coef is None else kl_coef) * share(kl, x.mask)
        report["kl_loss"] = masked_sum(kl.detach(), x.mask)
    coefficient = plan.entropy_loss.args.get("entropy_coef", 0.0)
    if coefficient:
        loss = loss - coefficient * mean_entropy(plan.entropy_loss, x, share)
    return loss, report


def _sampler(plan: AlgorithmPlan, x: LossInputs) -> torch.Tensor:
    """Log-probabilities under the behaviour policy, [B, R]; rows of datasets have those of the policy."""
    return x.logprobs if plan.offline else torch.where(x.expert > 0, x.logprobs, x.old_logprobs)


@torch.no_grad()
def mismatch(x: LossInputs) -> Report:
    """Measures the distance of the trainer from the behaviour policy: means over kernel tokens and over stale tokens.

    Tokens sampled by the trainer's version differ only by the engine's arithmetic (kernel). Tokens of older versions,
    or in a response that an older version began, differ also by the training since (stale). A mean of no tokens is not
    reported. rho = trainer's probability / engine's, of sampled tokens;
    kl: rho - 1 - log rho, which estimates KL(engine || trainer) and is never negative; ratio: rho; logprob_diff:
    |log rho|.
    """
    difference = x.proximal - x.old_logprobs
    log_rho = difference.clamp(-LIMIT, LIMIT)
    rolled_out = x.mask * (1 - x.expert)
    on_policy_mask = torch.zeros_like(x.mask) if x.on_policy_mask is None else x.on_policy_mask.to(x.mask.dtype)
    report = {"rollout_logprob_diff": masked_sum(difference.abs(), rolled_out)}
    for name, mask in (("kernel", rolled_out * on_policy_mask), ("stale", rolled_out * (1 - on_policy_mask))):
        report[f"mismatch/{name}_kl"] = masked_sum(log_rho.exp() - 1 - log_rho, mask)
        report[f"mismatch/{name}_ratio"] = masked_sum(log_rho.exp(), mask)
        report[f"mismatch/{name}_logprob_diff"] = masked_sum(difference.abs(), mask)
    return report


def wants_entropy_gradient(plan: AlgorithmPlan) -> bool:
    return bool(plan.entropy_loss.args.get("entropy_coef", 0.0))
