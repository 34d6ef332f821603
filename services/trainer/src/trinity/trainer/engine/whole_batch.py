"""Prepares a batch: everything that forward passes compute for it before an update, and its mini-batches.

The passes have no gradients and cover all sequences, so that every micro-batch can compute its exact share of the loss.
Log-probabilities are float [R] of each sequence's response tokens, in the batch's order.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trinity.config import Plan
from trinity.config.algorithms import AlgorithmPlan
from trinity.trainer.algorithms.correction import decouples
from trinity.trainer.algorithms.inputs import WholeBatch
from trinity.trainer.algorithms.kl import estimate
from trinity.trainer.algorithms.policy_losses import POLICY_LOSSES
from trinity.trainer.data.batch import TrainBatch, TrainSequence, with_advantages
from trinity.trainer.data.microbatch import MicroBatch
from trinity.trainer.engine.critic import explained_variance
from trinity.trainer.engine.learner import NoGradForward, memory_for
from trinity.trainer.model.policy import OffloadedReference

Ragged = Sequence[np.ndarray]
Forward = Callable[[MicroBatch], tuple[torch.Tensor, torch.Tensor]]  # log-probabilities and entropy, [B, R] each


class BatchPreparer:
    """for_step -> (mini_batches -> for_update) for each update. Collectives: every rank passes the same batch."""

    def __init__(
        self,
        plan: Plan,
        no_grad: NoGradForward,
        policy: Forward,
        reference: Forward | None,
        critic: Callable[[MicroBatch], torch.Tensor] | None,
    ) -> None:
        """`critic` returns values [B, R]."""
        self._plan, trainer = plan.algorithm, plan.config.trainer
        self._no_grad = no_grad
        self._policy = policy
        self._reference = reference
        self._critic = critic
        self._epochs = trainer.epochs_per_batch
        self._splits = trainer.mini_batch_size, trainer.shared_prompts
        reasons = self._plan.kl_in_reward, self._plan.of_pairs, self._epochs > 1
        offloaded = isinstance(reference, OffloadedReference)
        # Whether the reference computes the whole batch once, before the first update, instead of each micro-batch.
        self._reference_is_first = reference is not None and (offloaded or any(reasons))

    def for_step(self, batch: TrainBatch, kl_coef: float) -> tuple[TrainBatch, dict[str, float]]:
        """The batch with advantages, returns and log-probabilities from before the first update, and metrics of these.

        kl_coef: coefficient of the KL penalty in the reward. Raises BadStep if the batch does not fit in memory, or if
        an advantage is not finite.
        """
        plan, metrics, values = self._plan, dict[str, float](), None
        with memory_for(batch, self._no_grad.ranks):
            if self._critic is not None:
                values = self._no_grad.tokens(rolled_out(batch).sequences, self._critic)
            if self._reference_is_first:
                batch = with_values(batch, "reference_logprobs", self._reference_logprobs(batch))
            if plan.kl_in_reward:
                batch, kl = apply_kl_penalty(plan, batch, references_of(batch), kl_coef, values)
                metrics |= {} if kl is None else {"reward_kl": kl}
            elif values is not None:
                sequences = with_advantages(batch.sequences, plan, batch.step, None, values)
                batch = replace(batch, sequences=tuple(sequences))
            if values is not None and (explained := explained_variance(batch.sequences)) is not None:
                metrics["critic/explained_variance"] = explained
            if number_of_parts(batch, plan, *self._splits) * self._epochs > 1 and not plan.offline:
                batch = with_values(batch, "proximal_logprobs", self.logprobs(batch, self._policy))
        return batch, metrics

    def mini_batches(self, batch: TrainBatch) -> Iterator[TrainBatch]:
        """One batch for each update of the step."""
        size, whole_groups = self._splits
        return mini_batches(batch, self._plan, size, self._epochs, whole_groups)

    def for_update(self, batch: TrainBatch) -> TrainBatch:
        """The mini-batch with the statistics that the policy loss needs, under the weights as they are now."""
        if not needs_policy(self._plan):
            return batch
        with memory_for(batch, self._no_grad.ranks):
            reference = references_of(batch) if self._plan.of_pairs else None
            return with_batch_statistics(self._plan, batch, self.logprobs(batch, self._policy), reference)

    @torch.no_grad()
    def reference_of(self, micro: MicroBatch) -> torch.Tensor | None:
        """The reference's log-probabilities of a micro-batch, [B, R]; None without a reference."""
        if self._reference_is_first:
            return micro.reference_logprobs
        return None if self._reference is None else self._reference(micro)[0]

    def logprobs(self, batch: TrainBatch, model: Forward) -> list[np.ndarray]:
        """Log-probabilities of every sequence's response tokens, float32 [R] each, on every rank."""
        return self._no_grad.tokens(batch.sequences, lambda micro: model(micro)[0])

    def _reference_logprobs(self, batch: TrainBatch) -> list[np.ndarray]:
        reference = self._reference
        assert reference is not None
        with reference.on_device() if isinstance(reference, OffloadedReference) else contextlib.nullcontext():
            return self.logprobs(batch, reference)


def rolled_out(batch: TrainBatch) -> TrainBatch:
    """The batch without the rows of datasets."""
    return replace(batch, sequences=tuple(sequence for sequence in batch.sequences if not sequence.expert))


def apply_kl_penalty(
    plan: AlgorithmPlan, batch: TrainBatch, reference: Ragged, kl_coef: float, values: Ragged | None = None
) -> tuple[TrainBatch, float | None]:
    """Computes advantages of rewards minus kl_coef KL(sampler || reference) at each token, and the mean KL.

    The estimators are those of kl_loss_fn, with the sampling policy for lp. The mean is over sequences with tokens to
    train, of their tokens' means; None if there are none. values: a critic's, of the rolled-out sequences.
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
    """Returns True if the policy loss needs `with_batch_statistics`."""
    return bool({"keep", "peers", "pairs"} & {*plan.loss_traits})


def with_batch_statistics(
    plan: AlgorithmPlan, batch: TrainBatch, policy: Ragged, reference: Ragged | None
) -> TrainBatch:
    """Sets `keep_mask` (False at tokens that the loss leaves out) and `peers` (a statistic of the sequence's pair or
    group) if the loss declares them. reference: log-probabilities for losses of pairs.
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
    """Sets this field of each sequence to its value."""
    pairs = zip(batch.sequences, values, strict=True)
    return replace(batch, sequences=tuple(replace(sequence, **{name: value}) for sequence, value in pairs))


def references_of(batch: TrainBatch) -> Ragged:
    """The reference's log-probabilities; empty if it computes each micro-batch instead."""
    return [s.reference_logprobs for s in batch.sequences if s.reference_logprobs is not None]


def _float64(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.float64))


def _sampler(plan: AlgorithmPlan, sequence: TrainSequence, policy: np.ndarray) -> np.ndarray:
    """Log-probabilities in the ratio's denominator: the rollout's, or if decoupled the trainer's."""
    if not decouples(plan.correction, sequence.proximal_logprobs):
        return sequence.old_logprobs
    return policy if sequence.proximal_logprobs is None else sequence.proximal_logprobs


def mini_batches(
    batch: TrainBatch, plan: AlgorithmPlan, size: int | None, epochs: int, whole_groups: bool = False
) -> Iterator[TrainBatch]:
    """Yields one part of the batch for each update, of about `size` sequences (None: all), in `epochs` passes.

    A single part is the batch itself. Otherwise the sequences of each part keep the order of the batch, and each pass
    draws the assignment from the step and the number of the pass. Groups stay in one part if whole_groups is set or
    the loss compares their members; otherwise sequences are assigned one by one. Expert rows are assigned separately,
    so that their numbers per part differ by at most one.
    """
    units = _units(batch.sequences, plan, whole_groups)
    count = number_of_parts(batch, plan, size, whole_groups)
    for epoch in range(epochs):
        if count == 1:
            yield batch
            continue
        for part in _deal(units, batch.sequences, count, np.random.default_rng([batch.step, epoch])):
            yield replace(batch, sequences=tuple(batch.sequences[index] for index in part))


def number_of_parts(batch: TrainBatch, plan: AlgorithmPlan, size: int | None, whole_groups: bool = False) -> int:
    """Number of parts in each pass of `mini_batches`: at least one, and each has a sequence."""
    if size is None:
        return 1
    return max(1, min(len(_units(batch.sequences, plan, whole_groups)), -(-len(batch.sequences) // size)))


def _units(sequences: Sequence[TrainSequence], plan: AlgorithmPlan, whole_groups: bool) -> list[list[int]]:
    """Lists of indices that must stay in one part."""
    if not whole_groups and not {"pairs", "peers"} & {*plan.loss_traits}:
        return [[index] for index in range(len(sequences))]
    groups: dict[tuple[bool, int], list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault((sequence.expert, sequence.group), []).append(index)
    return list(groups.values())


def _deal(
    units: list[list[int]], sequences: Sequence[TrainSequence], count: int, random: np.random.Generator
) -> list[list[int]]:
    shuffled = [units[place] for place in random.permutation(len(units))]
    ordered = sorted(shuffled, key=lambda unit: sequences[unit[0]].expert)
    return [sorted(index for unit in ordered[part::count] for index in unit) for part in range(count)]
