"""OPMD: a step of mirror descent, whose optimum has A = tau log(policy / sampler), in three forms.

Trinity-RFT's report, arXiv:2505.17826v1, appendix A. D is the sum of lp - lo over the tokens of a sequence.
"""

import torch

from trinity.plugins import NonNegative, Positive, algorithm, policy_loss
from trinity.trainer.algorithms.aggregation import Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LossInputs, WholeBatch, sequence_mean, sequence_sum


@policy_loss("opmd", source="arXiv:2505.17826v1, A")
def opmd(x: LossInputs, share: Share, *, tau: NonNegative = 1.0) -> tuple[torch.Tensor, Report]:
    """-A lp / (1 + tau). The simplest form, regularized towards the current policy."""
    return share(-x.advantages * x.logprobs / (1 + tau), x.mask), {}


@policy_loss(
    "opmd_kimi",
    source="Kimi k1.5, arXiv:2501.12599, eq. 3",
    traits=["sequences"],
    aggregation="seq-mean-token-sum",
)
def opmd_kimi(x: LossInputs, share: Share, *, tau: NonNegative = 1.0) -> tuple[torch.Tensor, Report]:
    """-A D + tau / 2 D^2 = ((A - tau D)^2 - A^2) / (2 tau) of each sequence.

    A is the mean of the advantages of the sequence's tokens.
    """
    advantage, distance = sequence_mean(x.advantages, x.mask), sequence_sum(x.logprobs - x.old_logprobs, x.mask)
    loss = -advantage * distance + 0.5 * tau * distance.square()
    return share.of_sequences(loss, x.mask), _report(distance, x)


def group_means(batch: WholeBatch, *, tau: float) -> list[float]:
    """Mean of a over the sequences of each sequence's group that have tokens to train."""
    values: dict[int, list[float]] = {}
    for advantage, ratio, mask, group in zip(
        batch.advantages, batch.log_ratios, batch.masks, batch.groups, strict=True
    ):
        if mask.any():
            value = float(advantage[mask].mean()) - tau * float(ratio[mask].sum())
            values.setdefault(group, []).append(value)
    return [sum(values[group]) / len(values[group]) if group in values else 0.0 for group in batch.groups]


@policy_loss(
    "opmd_pairwise",
    source="arXiv:2505.17826v1, A",
    traits=["sequences"],
    aggregation="seq-mean-token-sum",
    aggregations=["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"],
    peers=group_means,
)
def opmd_pairwise(x: LossInputs, share: Share, *, tau: Positive = 1.0) -> tuple[torch.Tensor, Report]:
    """(a - mean of a over the group)^2 / (2 tau) of each sequence, a = A - tau D and A is the reward.

    A group of K gives sum over its pairs of (a_i - a_j)^2 / (2 tau K), in which the partition function cancels out. The
    group's mean is x.peers_B, of the same weights: since deviations from a mean add up to 0, the
    gradient of the squares is that of the whole. A group of one has loss 0.
    """
    assert x.peers_B is not None
    distance = sequence_sum(x.logprobs - x.old_logprobs, x.mask)
    deviation = sequence_mean(x.advantages, x.mask) - tau * distance - x.peers_B
    return share.of_sequences(deviation.square() / (2 * tau), x.mask), _report(distance, x)


def _report(distance: torch.Tensor, x: LossInputs) -> Report:
    return {"sequence_log_ratio": masked_sum(distance.detach(), x.mask.sum(-1) > 0)}


algorithm("opmd_kimi", policy_loss="opmd_kimi", advantage="opmd")
algorithm("opmd_pairwise", policy_loss="opmd_pairwise", advantage="reinforce")
