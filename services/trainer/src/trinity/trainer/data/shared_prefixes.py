"""Layout of packed micro-batches in which sequences share prefixes, each of which is computed once.

The segments of a row form trees. A token attends to earlier tokens of its segment and to the segments on the path from
the root. So a segment's states equal those of each sequence computed separately, and their gradient is the sum over the
sequences through it. Responses to a shared prompt are a tree of depth one; turns that begin with the same earlier turns
are deeper ones. A sequence that begins another needs no segment.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from trinity.trainer.data.batch import TrainSequence

# A prefix is a segment if it has this many tokens, and sharing it saves this share of its sequences' tokens from its
# start: below it the additional call of the attention kernel costs more than sharing saves.
_LEAST_TOKENS = 8
_LEAST_SAVED = 0.1

Places = slice | torch.Tensor


@dataclass(frozen=True)
class Segment:
    """The tokens from `start` to `end` of a sequence, given by its index. `below` continue it."""

    start: int
    end: int
    sequence: int = 0
    below: tuple["Segment", ...] = ()

    @property
    def tokens(self) -> int:
        """Counts its tokens and those of all segments below it."""
        return self.end - self.start + sum(one.tokens for one in self.below)


@dataclass(frozen=True)
class Tree:
    """members: indices of sequences; each that begins another precedes it. new_tokens: for each the number of tokens
    that it does not share with the member before it, or with all others if it is the first.
    """

    members: list[int]
    new_tokens: list[int]
    root: Segment


@dataclass(frozen=True)
class Level:
    """The segments of one depth that others continue, and for each of them all segments below it.

    read, readers: places of their tokens in the row, slices where they are end to end. read_ends, reader_ends int32
    [segments + 1]: starts of each segment and of what is below it within these places, and the end of the last.
    longest, most_readers: maximum over the segments of their tokens, and of the tokens below them.
    """

    read: Places
    readers: Places
    read_ends: torch.Tensor
    reader_ends: torch.Tensor
    longest: int
    most_readers: int

    def to(self, device: torch.device) -> "Level":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: Any = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class SharedPrefixes:
    """parents: for each segment of the row the index of its parent segment; None for roots. levels: by depth."""

    parents: tuple[int | None, ...]
    levels: tuple[Level, ...]

    def to(self, device: torch.device) -> "SharedPrefixes":
        return replace(self, levels=tuple(level.to(device) for level in self.levels))


@dataclass(frozen=True)
class Row:
    """Layout of sequences in a packed row.

    lengths: lengths of the segments, end to end. places: for each sequence int64 [T], the places of its tokens in the
    row. shared: None if no two segments share a prefix.
    """

    lengths: tuple[int, ...]
    places: list[np.ndarray]
    shared: SharedPrefixes | None


def path_to(segment: int, parents: Sequence[int | None] | None) -> list[int]:
    """Returns the segments from the root to this one. A segment beyond `parents` (padding) is a root."""
    path = [segment]
    while parents and path[-1] < len(parents) and (above := parents[path[-1]]) is not None:
        path.append(above)
    return path[::-1]


def trees_of(sequences: Sequence[TrainSequence]) -> list[Tree]:
    """Makes trees of the prefixes that are worth sharing, in the order of their first sequences."""
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].token_ids.tobytes())
    common = [0, *(_common(sequences[one], sequences[other]) for one, other in pairwise(order))]
    lengths = [sequences[index].length for index in order]
    kept, shared, before = [], [], None
    for place, length in enumerate(lengths):
        before = common[place] if before is None else before
        if place + 1 < len(order) and common[place + 1] == length:
            continue  # the next sequence begins with it
        kept.append(place)
        shared.append(before)
        before = None
    trees, first = [], 0
    for root in _forest([lengths[place] for place in kept], shared, range(len(kept)), 0):
        last = kept[_leaves(root)[-1]] + 1
        new_tokens = [lengths[place] - common[place] for place in range(first, last)]
        new_tokens[0] = max(1, lengths[first] - root.end)
        trees.append(Tree(order[first:last], new_tokens, _named(root, [order[place] for place in kept])))
        first = last
    return sorted(trees, key=lambda tree: min(tree.members))


def _common(one: TrainSequence, other: TrainSequence) -> int:
    """Counts the equal tokens at their start. Recorded experts may differ after the prompts, so sharing ends there."""
    limit = min(s.length if s.routes is None else s.prompt_length for s in (one, other))
    differ = np.flatnonzero(one.token_ids[:limit] != other.token_ids[:limit])
    return int(differ[0]) if len(differ) else limit


def _forest(lengths: Sequence[int], shared: Sequence[int], part: range, start: int) -> list[Segment]:
    """Lays out what a part of the sequences has from `start`. shared: tokens that each shares with the one before.

    Recursion is shallow: each shared segment saves _LEAST_SAVED of the sequences below it.
    """
    found, parts = [], [part]
    while parts:
        part = parts.pop(0)
        if len(part) == 1:
            found.append(Segment(start, lengths[part[0]], part[0]))
            continue
        end = min(shared[place] for place in part[1:])
        cuts = [part.start, *(place for place in part[1:] if shared[place] == end), part.stop]
        inner = [range(first, last) for first, last in pairwise(cuts)]
        saved = (end - start) * (len(part) - 1)
        if end - start < _LEAST_TOKENS or saved < _LEAST_SAVED * sum(lengths[place] - start for place in part):
            parts[:0] = inner
        else:
            below = tuple(one for each in inner for one in _forest(lengths, shared, each, end))
            found.append(Segment(start, end, part[0], below))
    return found


def _leaves(root: Segment) -> list[int]:
    return [leaf for one in root.below for leaf in _leaves(one)] if root.below else [root.sequence]


def _named(root: Segment, names: Sequence[int]) -> Segment:
    return replace(root, sequence=names[root.sequence], below=tuple(_named(one, names) for one in root.below))


def token_count(sequences: Sequence[TrainSequence]) -> int:
    """Counts the tokens of sequences in a row; a shared one counts once."""
    return sum(tree.root.tokens for tree in trees_of(sequences))


def row_of(sequences: Sequence[TrainSequence], units: Sequence[int] = ()) -> Row:
    """Lays out a row. units: sizes of runs of consecutive sequences that share prefixes; none: no prefix is shared."""
    trees, first = [], 0
    for size in units or [1] * len(sequences):
        for tree in trees_of(sequences[first : first + size]):
            members = [first + index for index in tree.members]
            trees.append(Tree(members, tree.new_tokens, _named(tree.root, range(first, first + size))))
        first += size
    lengths, shared, leaves = lay_out([tree.root for tree in trees])
    places = [np.empty(0, np.int64)] * len(sequences)
    for tree in trees:
        longer = places[0]
        for index in reversed(tree.members):
            longer = places[index] = leaves.get(index, longer)[: sequences[index].length]
    return Row(lengths, places, shared)


def lay_out(
    roots: Iterable[Segment],
) -> tuple[tuple[int, ...], SharedPrefixes | None, dict[int, np.ndarray]]:
    """Returns the segments' lengths and trees, and for each leaf's sequence the places of its tokens.

    Siblings are adjacent: first segments without children, then the others; the children of each of these follow.
    """
    lengths: list[int] = []
    parents: list[int | None] = []
    leaves: dict[int, np.ndarray] = {}
    levels: list[list[tuple[range, range]]] = []
    end = 0

    def place(siblings: Iterable[Segment], parent: int | None, depth: int, path: np.ndarray) -> None:
        nonlocal end
        continued = []
        for one in sorted(siblings, key=lambda one: bool(one.below)):
            own = range(end, end + one.end - one.start)
            whole = np.concatenate([path, np.arange(own.start, own.stop)])
            if one.below:
                continued.append((one, len(lengths), own, whole))
            else:
                leaves[one.sequence] = whole
            lengths.append(len(own))
            parents.append(parent)
            end = own.stop
        if continued and len(levels) == depth:
            levels.append([])
        for one, number, own, whole in continued:
            begin = end
            place(one.below, number, depth + 1, whole)
            levels[depth].append((own, range(begin, end)))

    place(roots, None, 0, np.empty(0, np.int64))
    shared = SharedPrefixes(tuple(parents), tuple(map(_level, levels))) if levels else None
    return tuple(lengths), shared, leaves


def _level(segments: list[tuple[range, range]]) -> Level:
    read, readers = zip(*segments, strict=True)
    longest, most = (max(map(len, parts)) for parts in (read, readers))
    return Level(_places(read), _places(readers), _ends(read), _ends(readers), longest, most)


def _places(parts: Sequence[range]) -> Places:
    if all(one.stop == other.start for one, other in pairwise(parts)):
        return slice(parts[0].start, parts[-1].stop)
    return torch.from_numpy(np.concatenate([np.arange(part.start, part.stop) for part in parts]))


def _ends(parts: Iterable[range]) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *map(len, parts)]).astype(np.int32))


def units_of(sequences: Sequence[TrainSequence], tokens: int, ranks: int) -> Iterator[tuple[list[int], int]]:
    """Yields indices of sequences that share prefixes, and their tokens in a row.

    Trees of more than `tokens` tokens are divided, and further if ranks would be idle.
    """
    trees = trees_of(sequences)
    total = sum(tree.root.tokens for tree in trees)
    for tree in trees:
        most, size = len(tree.members), tree.root.tokens
        for count in range(min(most, max(1, round(ranks * size / total), -(-size // tokens))), most + 1):
            parts = _divided(tree, count) if count < most else [[index] for index in tree.members]
            sizes = [token_count([sequences[index] for index in part]) for part in parts]
            if all(len(part) == 1 or size <= tokens for part, size in zip(parts, sizes, strict=True)):
                yield from zip(parts, sizes, strict=True)
                break


def _divided(tree: Tree, count: int) -> list[list[int]]:
    """Divides the members, in their order, into at most `count` parts with about equally many new tokens."""
    ends = np.cumsum(tree.new_tokens)
    part_of = (ends - np.asarray(tree.new_tokens) / 2) * count // ends[-1]
    return [[tree.members[place] for place in np.flatnonzero(part_of == part)] for part in np.unique(part_of)]
