"""Distance of the trainer from the behaviour policy, always measured, with kernels and staleness apart.

Tokens sampled by the trainer's own version differ by the engine's arithmetic alone; those of older versions, or in a
response that older ones began, also by the training since. rho = trainer's probability / engine's, of sampled
tokens.
"""

import torch

from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.policy_losses.ratios import LIMIT
from trinity.trainer.algorithms.report import Report, masked_sum


@torch.no_grad()
def mismatch(x: LossInputs) -> Report:
    """Means over tokens, for `kernel` and for `stale`; a mean of no tokens is not reported.

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
