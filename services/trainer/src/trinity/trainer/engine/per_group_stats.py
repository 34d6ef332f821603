"""Statistics of each group of a batch under the current weights, to find the group that causes a bad step."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trinity.trainer.algorithms.aggregation import Report, join
from trinity.trainer.data.batch import TrainBatch, TrainSequence
from trinity.trainer.data.microbatch import MicroBatch
from trinity.trainer.engine.learner import LossOf, NoGradForward

# Log-ratios are clamped to it before they become ratios, as in the losses.
_LIMIT = 20.0

Groups = list[dict[str, Any]]


@torch.no_grad()
def per_group_stats(
    batch: TrainBatch, no_grad: NoGradForward, logprobs: Callable[[MicroBatch], torch.Tensor], loss_of: LossOf
) -> Groups:
    """One entry for each group, in the order of the batch: numbers of sequences and tokens, mean reward and advantage,
    its share of the batch's loss, mean and maximum ratio to the behaviour policy; `finite`: whether all of these are.

    `loss_of` is the loss of the whole batch. A collective: the same batch on every rank.
    """
    found = []
    for number in dict.fromkeys(sequence.group for sequence in batch.sequences):
        members = tuple(sequence for sequence in batch.sequences if sequence.group == number)
        found.append({"group": number, **_group_stats(members, no_grad, logprobs, loss_of)})
    return found


def _group_stats(
    members: Sequence[TrainSequence],
    no_grad: NoGradForward,
    logprobs: Callable[[MicroBatch], torch.Tensor],
    loss_of: LossOf,
) -> dict[str, Any]:
    reports: list[Report] = []
    for indices, micro in no_grad.planner.micro_batches(members):
        share, _ = loss_of([members[index] for index in indices], micro)
        reports.append({"loss": torch.stack([share.float(), torch.ones_like(share, dtype=torch.float32)])})
    loss = float(no_grad.total(join(reports))["loss"][0]) / no_grad.planner.copies
    policy = no_grad.tokens(members, logprobs)
    distances = [(p - s.old_logprobs)[s.mask] for p, s in zip(policy, members, strict=True)]
    ratios = np.exp(np.clip(np.concatenate(distances).astype(np.float64), -_LIMIT, _LIMIT))
    advantages = np.concatenate([s.advantages[s.mask] for s in members])
    values = {
        "reward": float(np.mean([s.reward for s in members])),
        "advantage": float(advantages.mean()) if len(advantages) else 0.0,
        "loss": loss,
        "ratio": float(ratios.mean()) if len(ratios) else 1.0,
        "ratio_max": float(ratios.max()) if len(ratios) else 1.0,
    }
    finite = all(np.isfinite(value) for value in values.values())
    return {"sequences": len(members), "tokens": len(ratios), "finite": finite, **values}
