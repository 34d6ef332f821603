"""Statistics of the whole batch's log-probabilities, computed before it is split into micro-batches.

A forward pass without gradients over all sequences comes first, with the weights at the start of the step. Then every
micro-batch can compute its exact share of the loss. Log-probabilities are float [R] of each sequence's response tokens,
in the batch's order.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from trinity.config.algorithms import AlgorithmPlan
from trinity.trainer.algorithms.correction import decouples
from trinity.trainer.algorithms.kl import KL
from trinity.trainer.algorithms.policy_losses import covariance, dpo, m2po, opmd
from trinity.trainer.data.batch import TrainBatch, TrainSequence, with_advantages

Ragged = Sequence[np.ndarray]


def apply_kl_penalty(
    plan: AlgorithmPlan, batch: TrainBatch, reference: Ragged, kl_coef: float, values: Ragged | None = None
) -> tuple[TrainBatch, float | None]:
    """The batch with advantages of rewards minus kl_coef KL(sampler || reference) at each token; and the mean KL.

    The mean is over the sequences with tokens to train, of their tokens' means; None without any. kl_loss_fn's
    estimators, with the policy that sampled for lp. values: a critic's, of the rolled-out sequences.
    """
    estimate = KL[plan.kl_penalty.name]
    penalties, means = [], []
    for sequence, logprobs in zip(batch.sequences, reference, strict=True):
        if sequence.expert:
            continue
        old = torch.from_numpy(np.asarray(sequence.old_logprobs, np.float64))
        kl = estimate(old, torch.from_numpy(np.asarray(logprobs, np.float64)), old).numpy()
        penalties.append(kl_coef * np.where(sequence.mask, kl, 0.0))
        if sequence.mask.any():
            means.append(float(kl[sequence.mask].mean()))
    sequences = with_advantages(batch.sequences, plan, batch.step, penalties, values)
    return replace(batch, sequences=tuple(sequences)), float(np.mean(means)) if means else None


def needs_policy(plan: AlgorithmPlan) -> bool:
    """Whether the policy loss needs `with_batch_statistics`."""
    return plan.policy_loss.name in ("m2po", "dpo", "opmd_pairwise", "clip_cov", "kl_cov")


def with_batch_statistics(
    plan: AlgorithmPlan, batch: TrainBatch, policy: Ragged, reference: Ragged | None
) -> TrainBatch:
    """The batch with `keep_mask` (m2po, clip_cov, kl_cov: False at the selected tokens) or `peers` (dpo: of the pair;
    opmd_pairwise: of the group). reference: for dpo alone.
    """
    name, args, sequences = plan.policy_loss.name, plan.policy_loss.args, batch.sequences
    masks = [torch.from_numpy(s.mask.astype(bool)) for s in sequences]
    if name == "dpo":
        assert reference is not None
        distances = [
            float((np.asarray(p, np.float64) - r)[s.mask].sum())
            for p, r, s in zip(policy, reference, sequences, strict=True)
        ]
        return _with_peers(batch, dpo.partners(distances, [s.pair for s in sequences]))
    advantages = [torch.from_numpy(s.advantages) for s in sequences]
    ratios = [
        torch.from_numpy(np.asarray(p, np.float64) - _sampler(plan, s, p))
        for p, s in zip(policy, sequences, strict=True)
    ]
    if name == "opmd_pairwise":
        groups = [s.group for s in sequences]
        return _with_peers(batch, opmd.group_means(advantages, ratios, masks, groups, args["tau"]))
    logprobs = [torch.from_numpy(np.asarray(p, np.float64)) for p in policy]
    rolled_out = [mask & (not s.expert) for mask, s in zip(masks, sequences, strict=True)]
    if name == "m2po":
        kept = m2po.keep(ratios, advantages, masks, args["m2_threshold"])
    elif name == "clip_cov":
        kept = covariance.chosen_to_clip(logprobs, ratios, advantages, rolled_out, args, batch.step)
    elif name == "kl_cov":
        kept = covariance.chosen_to_hold(logprobs, advantages, rolled_out, args["kl_cov_ratio"])
    else:
        return batch
    return replace(
        batch, sequences=tuple(replace(s, keep_mask=k.numpy()) for s, k in zip(sequences, kept, strict=True))
    )


def _sampler(plan: AlgorithmPlan, sequence: TrainSequence, policy: np.ndarray) -> np.ndarray:
    """The log-probabilities in the ratio's denominator: the rollout's, or if decoupled the trainer's."""
    if not decouples(plan.correction, sequence.proximal_logprobs):
        return sequence.old_logprobs
    return policy if sequence.proximal_logprobs is None else sequence.proximal_logprobs


def _with_peers(batch: TrainBatch, peers: list[float]) -> TrainBatch:
    sequences = (replace(s, peers=value) for s, value in zip(batch.sequences, peers, strict=True))
    return replace(batch, sequences=tuple(sequences))
