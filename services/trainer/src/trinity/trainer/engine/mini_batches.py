"""Several updates from one batch: each pass over it is shared out to mini-batches by an order drawn from the step.

Groups stay together where the loss compares the members of a group; otherwise sequences are assigned one by one.
Expert rows are assigned separately, so that their numbers per mini-batch differ by one at most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from trinity.config.algorithms import AlgorithmPlan
from trinity.trainer.data.batch import TrainBatch, TrainSequence

# Losses of a sequence that depend on others of its group.
_OF_GROUPS = ("dpo", "opmd_pairwise")


def mini_batches(batch: TrainBatch, plan: AlgorithmPlan, size: int | None, epochs: int) -> Iterator[TrainBatch]:
    """The batch's parts, one for each update, of about `size` sequences (None: all); `epochs` times all of them.

    A single part is the batch itself. Otherwise the sequences of each part are in the order of the batch, and the
    assignment is drawn for every pass from the step and the number of the pass alone.
    """
    units = _units(batch.sequences, plan)
    count = number_of_parts(batch, plan, size)
    for epoch in range(epochs):
        if count == 1:
            yield batch
            continue
        for part in _deal(units, batch.sequences, count, np.random.default_rng([batch.step, epoch])):
            yield replace(batch, sequences=tuple(batch.sequences[index] for index in part))


def number_of_parts(batch: TrainBatch, plan: AlgorithmPlan, size: int | None) -> int:
    """Of each pass; at least one, and none without a sequence."""
    if size is None:
        return 1
    return max(1, min(len(_units(batch.sequences, plan)), -(-len(batch.sequences) // size)))


def _units(sequences: Sequence[TrainSequence], plan: AlgorithmPlan) -> list[list[int]]:
    """Indices that must stay in one part."""
    if plan.policy_loss.name not in _OF_GROUPS:
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
