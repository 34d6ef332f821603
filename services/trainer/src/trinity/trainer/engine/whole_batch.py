"""Statistics of the whole batch's log-probabilities, computed before it is split into micro-batches.

A forward pass without gradients over all sequences comes first, with the weights at the start of the step. Then every
micro-batch can compute its exact share of the loss. Log-probabilities are float [R] of each sequence's response tokens,
in the batch's order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trinity.config.algorithms import AlgorithmPlan
from trinity.trainer.algorithms.correction import decouples
from trinity.trainer.algorithms.inputs import WholeBatch
from trinity.trainer.algorithms.kl import estimate
from trinity.trainer.algorithms.policy_losses import POLICY_LOSSES
from trinity.trainer.data.batch import TrainBatch, TrainSequence, with_advantages

Ragged = Sequence[np.ndarray]


def apply_kl_penalty(
    plan: AlgorithmPlan, batch: TrainBatch, reference: Ragged, kl_coef: float, values: Ragged | None = None
) -> tuple[TrainBatch, float | None]:
    """The batch with advantages of rewards minus kl_coef KL(sampler || reference) at each token; and the mean KL.

    The mean is over the sequences with tokens to train, of their tokens' means; None without any. kl_loss_fn's
    estimators, with the policy that sampled for lp. values: a critic's, of the rolled-out sequences.
    """
    penalties, means = [], []
    for sequence, logprobs in zip(batch.sequences, reference, strict=True):
        if sequence.expert:
            continue
        old = _float64(sequence.old_logprobs)
        kl = estimate(plan.kl_penalty, old, _float64(logprobs), old).numpy()
        penalties.append(kl_coef * np.where(sequence.mask, kl, 0.0))
        if sequence.mask.any():
            means.append(float(kl[sequence.mask].mean()))
    sequences = with_advantages(batch.sequences, plan, batch.step, penalties, values)
    return replace(batch, sequences=tuple(sequences)), float(np.mean(means)) if means else None


def needs_policy(plan: AlgorithmPlan) -> bool:
    """Whether the policy loss needs `with_batch_statistics`."""
    return bool({"keep", "peers", "pairs"} & {*plan.loss_traits})


def with_batch_statistics(
    plan: AlgorithmPlan, batch: TrainBatch, policy: Ragged, reference: Ragged | None
) -> TrainBatch:
    """The batch with `keep_mask` (False at tokens that the loss leaves out) or `peers` (numbers of the sequence's pair
    or group), if the loss declares `keep` or `peers`. reference: for losses that need it.
    """
    declared, sequences = POLICY_LOSSES[plan.policy_loss.name], batch.sequences
    if declared.keep is None and declared.peers is None:
        return batch
    both = list(zip(policy, sequences, strict=True))
    whole = WholeBatch(
        masks=[torch.from_numpy(s.mask.astype(bool) & (not s.expert)) for s in sequences],
        logprobs=[_float64(p) for p in policy],
        log_ratios=[_float64(np.asarray(p, np.float64) - _sampler(plan, s, p)) for p, s in both],
        advantages=[_float64(s.advantages) for s in sequences],
        reference=None if reference is None else [_float64(r) for r in reference],
        groups=[s.group for s in sequences],
        pairs=[s.pair for s in sequences],
        seed=batch.step,
    )
    if declared.keep is not None:
        batch = with_values(batch, "keep_mask", [k.numpy() for k in declared.keep(whole, **plan.policy_loss.args)])
    if declared.peers is not None:
        batch = with_values(batch, "peers", declared.peers(whole, **plan.policy_loss.args))
    return batch


def with_values(batch: TrainBatch, name: str, values: Iterable[Any]) -> TrainBatch:
    """The batch with this field of its sequences, one value each."""
    pairs = zip(batch.sequences, values, strict=True)
    return replace(batch, sequences=tuple(replace(sequence, **{name: value}) for sequence, value in pairs))


def references_of(batch: TrainBatch) -> Ragged:
    """The reference's log-probabilities, where it computed the whole batch first; else empty."""
    return [s.reference_logprobs for s in batch.sequences if s.reference_logprobs is not None]


def _float64(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.float64))


def _sampler(plan: AlgorithmPlan, sequence: TrainSequence, policy: np.ndarray) -> np.ndarray:
    """The log-probabilities in the ratio's denominator: the rollout's, or if decoupled the trainer's."""
    if not decouples(plan.correction, sequence.proximal_logprobs):
        return sequence.old_logprobs
    return policy if sequence.proximal_logprobs is None else sequence.proximal_logprobs
