"""Splits a batch: into mini-batches, one for each update; then over ranks by tokens, and there into micro-batches.

Groups stay in one mini-batch where the loss compares the members of a group; otherwise sequences are assigned one by
one. Expert rows are assigned separately, so that their numbers per mini-batch differ by one at most.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trinity.config import Plan
from trinity.config.algorithms import AlgorithmPlan
from trinity.data.vision import ImageRules
from trinity.trainer.data.batch import TrainBatch, TrainSequence
from trinity.trainer.data.images import ImageReader
from trinity.trainer.data.microbatch import MicroBatch, collate
from trinity.trainer.data.shared_prompts import token_count, with_equal_prompts
from trinity.trainer.model.attention import check_shared_prompts
from trinity.trainer.model.policy import TokenModel
from trinity.trainer.model.sequence_parallel import SequenceGroup
from trinity.trainer.process.ranks import Ranks

_LEAST_SAVED = 0.1  # of the tokens: else the second call of the attention kernel costs more than sharing saves


@dataclass(frozen=True)
class Limit:
    """The size of a micro-batch: `rows` sequences if given, else `tokens` tokens; a longer sequence goes alone.

    packed: sequences are laid end to end and their tokens count; otherwise rows x the longest counts. share_prompts:
    sequences with equal prompts go together, and the prompt counts once.
    """

    tokens: int
    packed: bool
    rows: int | None = None
    share_prompts: bool = False


class MicroBatchPlanner:
    """This rank's micro-batches of a batch. The ranks of a `group` share each sequence and get the same micro-batches.

    copies: number of ranks with the same micro-batches; sums over all ranks count each that often. tokens_per_gpu: the
    token limit of a micro-batch on one GPU.
    """

    def __init__(
        self,
        limit: Limit,
        padding: int,
        ranks: Ranks,
        group: SequenceGroup | None,
        device: torch.device,
        reader: ImageReader | None = None,
    ) -> None:
        self.copies = 1 if group is None else group.size
        self.tokens_per_gpu = limit.tokens // self.copies
        self._limit = limit
        self._padding = padding
        self._share, self._shares = ranks.rank // self.copies, ranks.world_size // self.copies
        self._device = device
        self._reader = reader

    @property
    def image_rules(self) -> ImageRules | None:
        """How the models read images; None: not at all."""
        return None if self._reader is None else self._reader.rules

    @classmethod
    def of(cls, plan: Plan, model: TokenModel, ranks: Ranks, device: torch.device, tokens: int) -> "MicroBatchPlanner":
        """From the trainer's configuration, for models with this one's input format. `tokens`: limit on each GPU."""
        trainer, size = plan.config.trainer, 1 if model.group is None else model.group.size
        rows = None if trainer.use_dynamic_bsz else trainer.micro_batch_size_per_gpu
        limit = Limit(tokens * size, model.packed, rows, trainer.shared_prompts)
        if limit.share_prompts:
            check_shared_prompts(model.model, model.packed, plan.lengths.model)
        padding = int(getattr(model.model.config, "pad_token_id", None) or 0)
        return cls(limit, padding, ranks, model.group, device, ImageReader.of(plan.config.model))

    def micro_batches(self, sequences: Sequence[TrainSequence]) -> Iterator[tuple[list[int], MicroBatch]]:
        """Micro-batches with the indices of their sequences, some perhaps empty. The same number on every rank."""
        units, share = [[index] for index in range(len(sequences))], False
        sizes = [sequence.length for sequence in sequences]
        if self._limit.share_prompts:
            groups = with_equal_prompts(sequences)
            tokens = sum(token_count([sequences[index] for index in members]) for members in groups)
            share = tokens <= (1 - _LEAST_SAVED) * sum(sizes)
        if share:
            units = _of_equal_prompts(sequences, groups, self._limit.tokens, self._shares)
            sizes = [token_count([sequences[index] for index in unit]) for unit in units]
        for planned in plan_micro_batches(sizes, self._shares, self._limit)[self._share]:
            indices = [index for unit in planned for index in units[unit]]
            yield indices, self._one([sequences[index] for index in indices], share)

    def one(self, sequences: Sequence[TrainSequence]) -> MicroBatch:
        """One micro-batch of these sequences, on the device."""
        return self._one(sequences, self._limit.share_prompts)

    def _one(self, sequences: Sequence[TrainSequence], share: bool) -> MicroBatch:
        return collate(sequences, self._padding, self._limit.packed, self._reader, share).to(self._device)


def plan_micro_batches(lengths: Sequence[int], ranks: int, limit: Limit) -> list[list[list[int]]]:
    """[rank][micro-batch] -> indices of sequences. Ranks get equal numbers of micro-batches, some perhaps empty.

    By rows: sequences are assigned to ranks in turn. By tokens: they go, longest first, to the rank with the fewest
    tokens. There packed ones go to the micro-batch with the fewest tokens, of as few as suffice on every rank, so that
    ranks stay in step. Padded micro-batches are filled in order of length, to pad little.
    """
    if limit.rows is not None:
        shares = [list(range(rank, len(lengths), ranks)) for rank in range(ranks)]
        plans = [[share[at : at + limit.rows] for at in range(0, len(share), limit.rows)] for share in shares]
    else:
        shares = _balanced(sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)), lengths, ranks)
        fill = _packed if limit.packed else _padded
        plans = fill(shares, lengths, limit.tokens)
    most = max(1, *(len(plan) for plan in plans))
    return [plan + [[] for _ in range(most - len(plan))] for plan in plans]


def _of_equal_prompts(
    sequences: Sequence[TrainSequence], groups: list[list[int]], tokens: int, ranks: int
) -> list[list[int]]:
    """Groups with one prompt, in parts of at most `tokens` each; in more where ranks would be without work."""
    sizes = [token_count([sequences[index] for index in members]) for members in groups]
    responses = [max(1, sequence.response_length) for sequence in sequences]
    units: list[list[int]] = []
    for members, size in zip(groups, sizes, strict=True):
        longest_first = sorted(members, key=lambda index: (-responses[index], index))
        for count in range(min(len(members), max(1, round(ranks * size / sum(sizes)))), len(members) + 1):
            parts = [sorted(part) for part in _balanced(longest_first, responses, count)]
            if all(len(part) == 1 or token_count([sequences[index] for index in part]) <= tokens for part in parts):
                units += parts
                break
    return units


def _balanced(longest_first: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Each index to the part with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for index in longest_first:
        load, part = loads[0]
        shares[part].append(index)
        heapq.heapreplace(loads, (load + lengths[index], part))
    return shares


def _packed(shares: list[list[int]], lengths: Sequence[int], tokens: int) -> list[list[list[int]]]:
    count = max(1, *(-(-sum(lengths[index] for index in share) // tokens) for share in shares))
    while True:
        plans = [[part for part in _balanced(share, lengths, count) if part] for share in shares]
        if all(len(part) == 1 or sum(lengths[i] for i in part) <= tokens for plan in plans for part in plan):
            return plans
        count += 1


def _padded(shares: list[list[int]], lengths: Sequence[int], tokens: int) -> list[list[list[int]]]:
    plans = []
    for share in shares:
        batches: list[list[int]] = []
        for index in share:  # longest first: the first sequence sets the width
            if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= tokens:
                batches[-1].append(index)
            else:
                batches.append([index])
        plans.append(batches)
    return plans


def mini_batches(
    batch: TrainBatch, plan: AlgorithmPlan, size: int | None, epochs: int, whole_groups: bool = False
) -> Iterator[TrainBatch]:
    """The batch's parts, one for each update, of about `size` sequences (None: all); `epochs` times all of them.

    A single part is the batch itself. Otherwise the sequences of each part are in the order of the batch, and the
    assignment is drawn for every pass from the step and the number of the pass alone. whole_groups: a group's sequences
    stay in one part for any loss.
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
    """Of each pass of `mini_batches`; at least one, and none without a sequence."""
    if size is None:
        return 1
    return max(1, min(len(_units(batch.sequences, plan, whole_groups)), -(-len(batch.sequences) // size)))


def _units(sequences: Sequence[TrainSequence], plan: AlgorithmPlan, whole_groups: bool) -> list[list[int]]:
    """Indices that must stay in one part."""
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
