"""Filters of exact and near duplicates. They keep the first row of each set."""

from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from trinity.task_pipeline import texts
from trinity.task_pipeline.base import Candidate, Context, Operator

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray


_SHARED = 4  # k: a greater k lengthens the prefixes and leaves fewer rows to compare


class ExactDedup(Operator):
    """Rows whose normalised text differs from all earlier rows'."""

    fields: list[str] = Field(default_factory=list, description="Columns to look at; empty: target_fields")
    lowercase: bool = True
    ignore_punctuation: bool = False

    def apply(self, candidates: list[Candidate], context: Context) -> list[Candidate]:
        first: dict[str, Candidate] = {}
        for candidate, text in zip(candidates, context.texts(candidates, self.fields), strict=True):
            first.setdefault(texts.normalised(text, self.lowercase, self.ignore_punctuation), candidate)
        return list(first.values())


class NearDedup(Operator):
    """Rows whose set of n-grams has a Jaccard index below `threshold` with the sets of all rows kept before.

    The filter is exact. Two sets with J >= t share k of the |x| - ceil(t |x|) + k n-grams of each set that are rarest
    in all rows (prefix filtering; Bayardo et al. 2007, Wang et al. 2012), so only such rows are compared.
    """

    fields: list[str] = Field(default_factory=list, description="Columns to look at; empty: target_fields")
    unit: texts.Unit = "character"
    ngram: PositiveInt = 5
    threshold: float = Field(0.8, gt=0, le=1)

    def apply(self, candidates: list[Candidate], context: Context) -> list[Candidate]:
        import numpy as np

        sets = _by_rarity([texts.gram_hashes(t, self.unit, self.ngram) for t in context.texts(candidates, self.fields)])
        sizes = np.array([len(grams) for grams in sets])
        common = np.ceil(self.threshold * sizes - 1e-9).astype(np.int64)  # with another row, at least
        needed = np.minimum(common, _SHARED)
        marked = np.zeros(1 + max((int(grams[-1]) for grams in sets), default=0), dtype=np.int64)
        kept: list[Candidate] = []
        holders: dict[int, list[int]] = {}  # n-gram of a prefix -> kept rows
        for index, (candidate, grams) in enumerate(zip(candidates, sets, strict=True)):
            size, prefix = len(grams), grams[: len(grams) - common[index] + needed[index]].tolist()
            hits = [other for gram in prefix for other in holders.get(gram, ())]
            others, times = np.unique(np.array(hits, dtype=np.int64), return_counts=True)
            alike = np.minimum(sizes[others], size) >= self.threshold * np.maximum(sizes[others], size) - 1e-9
            others = others[alike & (times >= np.minimum(needed[others], needed[index]))]
            if others.size:
                marked[grams] = 1
                found = marked[np.concatenate([sets[other] for other in others])]
                both = np.add.reduceat(found, np.cumsum(sizes[others]) - sizes[others])
                marked[grams] = 0
                if np.any(both / (sizes[others] + size - both) >= self.threshold - 1e-12):
                    continue
            kept.append(candidate)
            for gram in prefix:
                holders.setdefault(gram, []).append(index)
        return kept


def _by_rarity(hashes: "list[NDArray]") -> "list[NDArray[int64]]":
    """Each row's distinct n-grams as ascending numbers. Rarer n-grams, over all rows, have lower numbers."""
    import numpy as np

    if not hashes:
        return []
    distinct = [np.unique(row) for row in hashes]
    values, inverse, counts = np.unique(np.concatenate(distinct), return_inverse=True, return_counts=True)
    numbers = np.empty(len(values), dtype=np.int64)
    numbers[np.lexsort((values, counts))] = np.arange(len(values))
    ends = np.cumsum([len(row) for row in distinct])[:-1]
    return [np.sort(row) for row in np.split(numbers[inverse], ends)]
