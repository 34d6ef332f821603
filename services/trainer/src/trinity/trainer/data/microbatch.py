"""Micro-batches: how sequences are split over ranks and micro-batches, and the tensors of each micro-batch."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from trinity.data.images import PlacedImage
from trinity.data.vision import ImageRules
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.images import ImageReader, Seen
from trinity.trainer.data.shared_prefixes import Row, SharedPrefixes, row_of, units_of
from trinity.trainer.process.ranks import Ranks

_MOVED = (torch.Tensor, Seen, SharedPrefixes)


@dataclass(frozen=True)
class MicroBatch:
    """B sequences with M predicted tokens, N of them distinct; R is the length of the longest response.

    The model reads input_ids and position_ids, int64, and the images `seen`; position_ids are [3, ...] if the model
    reads images (ImageReader). Packed: one row [1, T] of segments laid end to end, without padding, attention_mask
    None; `boundaries` int32 [segments + 1] has their starts and `lengths` their lengths. A segment is a sequence, or
    a part of some that share prefixes (`shared`). Padded: [B, L] on the right, attention_mask int64 [B, L].

    Each response token is predicted, a shared one once: `predicting` int64 [N] is the position before it in the
    flattened input_ids, `targets` int64 [N] its id, `token_temperatures` float32 [N] its sampling temperature.
    `flat_indices` int64 [M] are the indices of all in [B, R] flattened (see `spread`), and `distinct` int64 [M] those
    of their predictions; None: N is M. `top_ids` int64 [N, k] are a teacher's likeliest tokens in its place; None if no
    loss reads them.

    routes int16 [tokens, layers, chosen]: experts that the engine chose for each token of the flattened input_ids, -1
    where it is unknown; None if it is for all.

    The loss reads the other fields, in the order of the sequences: expert, pairs and peers float32 [B]; mask,
    old_logprobs, advantages, on_policy_mask, keep_mask, proximal_logprobs and reference_logprobs float32 [B, R], 0
    after each response's end and for sequences without the field; mask is 0 outside trained tokens; teacher_top
    float32 [B, R, k], the teacher's log-probabilities of top_ids. They become LossInputs of the same names.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    boundaries: torch.Tensor
    lengths: tuple[int, ...]
    predicting: torch.Tensor
    targets: torch.Tensor
    token_temperatures: torch.Tensor
    flat_indices: torch.Tensor
    mask: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    on_policy_mask: torch.Tensor
    keep_mask: torch.Tensor
    proximal_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor
    expert: torch.Tensor
    pairs: torch.Tensor
    peers: torch.Tensor
    seen: Seen | None = None
    shared: SharedPrefixes | None = None
    distinct: torch.Tensor | None = None
    routes: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    teacher_top: torch.Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.attention_mask is None

    def to(self, device: torch.device) -> "MicroBatch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {name: value.to(device) for name, value in values.items() if isinstance(value, _MOVED)}
        return replace(self, **moved)  # type: ignore[arg-type]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Scatters values of the predicted tokens [N, ...] to [B, R, ...]; 0 elsewhere. Keeps the gradient."""
        values = values if self.distinct is None else values[self.distinct]
        flat = values.new_zeros(self.mask.numel(), *values.shape[1:])
        return flat.index_put((self.flat_indices,), values).view(*self.mask.shape, *values.shape[1:])

    def part(self, index: int, parts: int) -> "MicroBatch":
        """Returns the `index`-th of `parts` equal parts of a packed micro-batch, padded at the end with any token.

        The part predicts from its tokens. Boundaries, lengths and `shared` stay those of the whole, with the padding as
        an additional segment.
        """
        total = self.input_ids.shape[1]
        filling = -total % parts
        size = (total + filling) // parts
        ids, positions = pad(self.input_ids, (0, filling)), pad(self.position_ids, (0, filling))
        own = slice(index * size, (index + 1) * size)
        predicts = (self.predicting >= own.start) & (self.predicting < own.stop)
        spread = predicts if self.distinct is None else predicts[self.distinct]
        end = self.boundaries.new_tensor([total + filling])
        return replace(
            self,
            input_ids=ids[:, own],
            position_ids=positions[..., own],
            boundaries=torch.cat([self.boundaries, end]) if filling else self.boundaries,
            lengths=(*self.lengths, filling) if filling else self.lengths,
            predicting=self.predicting[predicts] - own.start,
            targets=self.targets[predicts],
            token_temperatures=self.token_temperatures[predicts],
            flat_indices=self.flat_indices[spread],
            distinct=None if self.distinct is None else (predicts.cumsum(0) - 1)[self.distinct[spread]],
            top_ids=None if self.top_ids is None else self.top_ids[predicts],
            seen=None if self.seen is None else self.seen.part(own.start, own.stop),
            routes=None if self.routes is None else pad(self.routes, (0, 0, 0, 0, 0, filling), value=-1)[own],
        )


def collate(
    sequences: Sequence[TrainSequence],
    padding: int,
    packed: bool = False,
    reader: ImageReader | None = None,
    units: Sequence[int] = (),
) -> MicroBatch:
    """Makes the tensors of some sequences; for none, of two untrained tokens, so that every rank runs the model.

    padding: token id of padding. reader: for a model that reads images. units: sizes of runs of consecutive sequences
    whose common prefixes are laid out once; they require `packed`, and a model that reads no images.
    """
    if not sequences:
        nothing = np.zeros(1, np.float32)
        filler = np.full(2, padding, np.int32)
        sequences, units = [TrainSequence(filler, 1, nothing, nothing.astype(bool), group=0)], ()
    width = max(sequence.length for sequence in sequences)
    row = row_of(sequences, units) if packed else _padded(sequences, width)
    size = sum(row.lengths) if packed else len(sequences) * width
    ids, positions, attention = _read(sequences, row, size, padding, reader)
    rows = (1, -1) if packed else (-1, width)
    responses = [sequence.response_length for sequence in sequences]
    longest = max(responses)
    has_proximal = all(sequence.proximal_logprobs is not None for sequence in sequences)

    def aligned(name: str) -> torch.Tensor:
        values = np.zeros((len(sequences), longest), np.float32)
        for row, sequence in enumerate(sequences):
            given = getattr(sequence, name)
            if given is not None:
                values[row, : sequence.response_length] = given
        return torch.from_numpy(values)

    def of_sequences(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)

    return MicroBatch(
        input_ids=ids.view(rows),
        position_ids=positions.view(rows) if reader is None else positions.view(3, *rows),
        attention_mask=None if packed else attention.view(rows),
        boundaries=torch.from_numpy(np.cumsum([0, *row.lengths]).astype(np.int32)),
        lengths=row.lengths,
        **_predictions(sequences, row, longest),
        mask=aligned("mask"),
        old_logprobs=aligned("old_logprobs"),
        advantages=aligned("advantages"),
        on_policy_mask=aligned("on_policy_mask"),
        keep_mask=aligned("keep_mask"),
        proximal_logprobs=aligned("proximal_logprobs") if has_proximal else None,
        reference_logprobs=aligned("reference_logprobs"),
        expert=of_sequences([float(s.expert) for s in sequences]),
        pairs=of_sequences([float(np.sign(s.pair)) for s in sequences]),
        peers=of_sequences([s.peers for s in sequences]),
        seen=None if reader is None else reader.read(sequences, [int(places[0]) for places in row.places]),
        shared=row.shared,
        routes=_routes(sequences, row, size),
    )


def _padded(sequences: Sequence[TrainSequence], width: int) -> Row:
    places = [index * width + np.arange(sequence.length) for index, sequence in enumerate(sequences)]
    return Row(tuple(sequence.length for sequence in sequences), places, None)


def _read(
    sequences: Sequence[TrainSequence], row: Row, size: int, padding: int, reader: ImageReader | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ids, positions and attention mask, int64 [size], of the row; with a reader positions are [3, size]."""
    ids, attention = np.full(size, padding, np.int64), np.zeros(size, np.int64)
    positions = np.zeros(size if reader is None else (3, size), np.int64)
    for sequence, places in zip(sequences, row.places, strict=True):
        ids[places] = sequence.token_ids
        positions[..., places] = np.arange(sequence.length) if reader is None else reader.positions(sequence)
        attention[places] = 1
    return torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(attention)


def _predictions(sequences: Sequence[TrainSequence], row: Row, longest: int) -> dict[str, Any]:
    """Returns MicroBatch's fields of the predicted tokens. Those with teachers' tokens are predicted each by itself."""
    prompts, counts = [s.prompt_length for s in sequences], [s.response_length for s in sequences]
    from_places = [places[prompt - 1 : -1] for places, prompt in zip(row.places, prompts, strict=True)]
    top = _top_tokens(sequences, longest)
    found = {
        "predicting": np.concatenate(from_places),
        "targets": np.concatenate([s.token_ids[s.prompt_length :] for s in sequences]).astype(np.int64),
        "token_temperatures": np.repeat(np.asarray([s.temperature for s in sequences], np.float32), counts),
    }
    distinct = None
    if row.shared is not None and not top:
        to_places = np.concatenate([places[prompt:] for places, prompt in zip(row.places, prompts, strict=True)])
        kinds, kind = np.unique(found["token_temperatures"], return_inverse=True)
        _, first, distinct = np.unique(to_places * len(kinds) + kind, return_index=True, return_inverse=True)
        found = {name: values[first] for name, values in found.items()}
    flat = [index * longest + np.arange(count) for index, count in enumerate(counts)]
    return {
        **{name: torch.from_numpy(values) for name, values in found.items()},
        "flat_indices": torch.from_numpy(np.concatenate(flat)),
        "distinct": None if distinct is None else torch.from_numpy(distinct),
        **top,
    }


def _top_tokens(sequences: Sequence[TrainSequence], longest: int) -> dict[str, torch.Tensor]:
    """Returns top_ids and teacher_top, if a sequence has a teacher's tokens; all that have them have equally many."""
    k = next((one.teacher_top.ids.shape[1] for one in sequences if one.teacher_top is not None), 0)
    if not k:
        return {}
    ids, logprobs = [], np.zeros((len(sequences), longest, k), np.float32)
    for row, one in enumerate(sequences):
        ids.append(np.zeros((one.response_length, k)) if one.teacher_top is None else one.teacher_top.ids)
        if one.teacher_top is not None:
            logprobs[row, : one.response_length] = one.teacher_top.logprobs
    return {
        "top_ids": torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        "teacher_top": torch.from_numpy(logprobs),
    }


def _routes(sequences: Sequence[TrainSequence], row: Row, size: int) -> torch.Tensor | None:
    """Returns the recorded experts of the row's tokens; a shared prefix has those of its last sequence."""
    known = [one.routes for one in sequences if one.routes is not None]
    if not known:
        return None
    routes = np.full((size, known[0].layers, known[0].chosen), -1, np.int16)
    for one, places in zip(sequences, row.places, strict=True):
        if one.routes is not None:
            ids = one.routes.ids(one.length)
            routes[places[: len(ids)]] = ids  # the last token has no route
    return torch.from_numpy(routes)


def after_first_token(tokens: Sequence[int], images: tuple[PlacedImage, ...] = ()) -> TrainSequence:
    """Makes a sequence whose response is all tokens but the first, for log-probabilities at temperature 1."""
    count = max(0, len(tokens) - 1)
    nothing = np.zeros(count, np.float32)
    return TrainSequence(np.asarray(tokens, np.int32), 1, nothing, nothing.astype(bool), group=0, images=images)


@dataclass(frozen=True)
class Limit:
    """Limits a micro-batch to `rows` sequences if given, else to `tokens` tokens or a single longer sequence.

    packed: sequences are laid end to end and their tokens count; otherwise rows x the longest counts. share_prefixes:
    sequences with common prefixes stay together, and their shared tokens count once.
    """

    tokens: int
    packed: bool
    rows: int | None = None
    share_prefixes: bool = False


class MicroBatchPlanner:
    """Plans this rank's micro-batches of a batch.

    copies: number of ranks that share each sequence and get the same micro-batches; sums over all ranks count each
    `copies` times. tokens_per_gpu: token limit of a micro-batch on one GPU. on_next: is called before each micro-batch.
    """

    def __init__(
        self,
        limit: Limit,
        padding: int,
        ranks: Ranks,
        copies: int,
        device: torch.device,
        reader: ImageReader | None = None,
    ) -> None:
        self.copies = copies
        self.tokens_per_gpu = limit.tokens // self.copies
        self._limit = limit
        self._padding = padding
        self._share, self._shares = ranks.rank // self.copies, ranks.world_size // self.copies
        self._device = device
        self._reader = reader
        self.on_next: Callable[[], object] = lambda: None

    @property
    def image_rules(self) -> ImageRules | None:
        """Rules by which the models read images; None for text models."""
        return None if self._reader is None else self._reader.rules

    def micro_batches(self, sequences: Sequence[TrainSequence]) -> Iterator[tuple[list[int], MicroBatch]]:
        """Yields micro-batches with the indices of their sequences: equally many on every rank, some perhaps empty."""
        units = [([index], sequence.length) for index, sequence in enumerate(sequences)]
        if self._limit.share_prefixes:
            units = list(units_of(sequences, self._limit.tokens, self._shares))
        for planned in plan_micro_batches([size for _, size in units], self._shares, self._limit)[self._share]:
            members = [units[unit][0] for unit in planned]
            indices = [index for unit in members for index in unit]
            self.on_next()
            yield indices, self._one([sequences[index] for index in indices], [len(unit) for unit in members])

    def one(self, sequences: Sequence[TrainSequence]) -> MicroBatch:
        """Makes one micro-batch of these sequences, on the device."""
        return self._one(sequences, [len(sequences)] if self._limit.share_prefixes else [])

    def _one(self, sequences: Sequence[TrainSequence], units: Sequence[int]) -> MicroBatch:
        return collate(sequences, self._padding, self._limit.packed, self._reader, units).to(self._device)


def plan_micro_batches(lengths: Sequence[int], ranks: int, limit: Limit) -> list[list[list[int]]]:
    """Returns indices of sequences by rank and micro-batch: equally many for each rank, some perhaps empty.

    By rows: sequences are assigned to ranks in turn. By tokens: each sequence, longest first, is assigned to the rank
    with the fewest tokens. There a packed sequence is assigned to the micro-batch with the fewest tokens, of as few as
    suffice on every rank, so that ranks stay in step. Padded micro-batches are filled by length, to pad little.
    """
    if limit.rows is not None:
        shares = [list(range(rank, len(lengths), ranks)) for rank in range(ranks)]
        plans = [[share[at : at + limit.rows] for at in range(0, len(share), limit.rows)] for share in shares]
    else:
        shares = _balanced(sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)), lengths, ranks)
        fill = _fill_packed if limit.packed else _fill_padded
        plans = fill(shares, lengths, limit.tokens)
    most = max(1, *(len(plan) for plan in plans))
    return [plan + [[] for _ in range(most - len(plan))] for plan in plans]


def _balanced(longest_first: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Assigns each index to the part with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for index in longest_first:
        load, part = loads[0]
        shares[part].append(index)
        heapq.heapreplace(loads, (load + lengths[index], part))
    return shares


def _fill_packed(shares: list[list[int]], lengths: Sequence[int], tokens: int) -> list[list[list[int]]]:
    count = max(1, *(-(-sum(lengths[index] for index in share) // tokens) for share in shares))
    while True:
        plans = [[part for part in _balanced(share, lengths, count) if part] for share in shares]
        if all(len(part) == 1 or sum(lengths[i] for i in part) <= tokens for plan in plans for part in plan):
            return plans
        count += 1


def _fill_padded(shares: list[list[int]], lengths: Sequence[int], tokens: int) -> list[list[list[int]]]:
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
