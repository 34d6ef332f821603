"""Scores of rows, each in [0, 1], over the rows that the operators left.

A score comes from a column, if its `column` says so: (value - low) / (high - low), clipped, with the least and the
greatest value of the rows where low and high are null, and 0 if those are equal. Else from the formula of its class.
`reverse` makes it 1 - score.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field, PositiveInt, model_validator

from trinity.config.schema.base import Section
from trinity.data.datasets import DatasetError, finite
from trinity.data.task_pipeline import texts, usage
from trinity.data.task_pipeline.base import Context, Entry, Operator, column_value

_BUCKETS, _MOST = 256, 255  # 256 * 255^2 < 2^24: dot products are exact in float32 in any order of summation


class Score(Section):
    """Arguments that all scores have."""

    model_config = Operator.model_config
    name: ClassVar[str]
    floor: ClassVar[float | None] = None
    """Default of `low`; None: the least value."""

    column: str | None = Field(None, min_length=1, description="Column of numbers; null: the formula")
    low: float | None = Field(None, allow_inf_nan=False, description="Value of a column that scores 0")
    high: float | None = Field(None, allow_inf_nan=False, description="Value of a column that scores 1")
    reverse: bool = Field(False, description="The higher the lower")

    @model_validator(mode="after")
    def _bounds_fit(self) -> "Score":
        if self.column is None and not (self.low is None and self.high is None):
            raise ValueError("low and high are bounds of a column; give column too")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low is {self.low}, must be less than high = {self.high}; reverse turns a score round")
        return self

    def values(self, entries: Sequence[Entry], context: Context) -> list[float]:
        """One score in [0, 1] for each row. Raises DatasetError naming row and column."""
        if self.column is None:
            found = self.measure(entries, context)
        else:
            floor = self.floor if self.low is None else self.low
            found = scaled([self.number(entry, self.column) for entry in entries], floor, self.high)
        return [1 - value for value in found] if self.reverse else found

    def number(self, entry: Entry, column: str) -> float:
        there, value = column_value(entry.row, column)
        found = finite(value)
        if found is None:
            what = f"is {value!r:.100}, must be a number" if there else "is missing, must be a number"
            raise DatasetError(f"row {entry.number}: {column!r} {what}")
        return found

    def measure(self, entries: Sequence[Entry], context: Context) -> list[float]:
        """The score if no column gives it."""
        raise NotImplementedError


class DifficultyScore(Score):
    """ln(1 + characters), scaled to [0, 1]; or what data-juicer's llm_difficulty_score_filter said."""

    name: ClassVar[str] = "difficulty"
    levels: list[str | int | float] = Field(default_factory=list, description="Values of the column, easiest first")

    @model_validator(mode="after")
    def _levels_fit(self) -> "DifficultyScore":
        if self.levels and (self.column is None or self.low is not None or self.high is not None):
            raise ValueError("levels are values of a column, and take the place of low and high")
        if self.levels and len(self.levels) < 2:
            raise ValueError(f"levels is {self.levels}; a difficulty needs two at least")
        return self

    def number(self, entry: Entry, column: str) -> float:
        if not self.levels:
            try:
                return super().number(entry, column)
            except DatasetError as error:
                raise DatasetError(f"{error.message}; levels gives an order to other values") from None
        value = column_value(entry.row, column)[1]
        if value not in self.levels:
            raise DatasetError(f"row {entry.number}: {column!r} is {value!r}, none of levels: {self.levels}")
        return self.levels.index(value) / (len(self.levels) - 1)

    def values(self, entries: Sequence[Entry], context: Context) -> list[float]:
        if not self.levels or self.column is None:
            return super().values(entries, context)
        found = [self.number(entry, self.column) for entry in entries]
        return [1 - value for value in found] if self.reverse else found

    def measure(self, entries: Sequence[Entry], context: Context) -> list[float]:
        judged = _judged(entries, "llm_difficulty_score")
        return judged or scaled([math.log1p(len(text)) for text in context.texts(entries)])


class QualityScore(Score):
    """texts.quality; or what data-juicer's llm_quality_score_filter said."""

    name: ClassVar[str] = "quality"

    def measure(self, entries: Sequence[Entry], context: Context) -> list[float]:
        return _judged(entries, "llm_quality_score") or [texts.quality(text) for text in context.texts(entries)]


class UsageFrequencyScore(Score):
    """How often earlier runs of the project trained a row, divided by the greatest such number."""

    name: ClassVar[str] = "usage_frequency"
    floor: ClassVar[float | None] = 0.0
    folders: list[str] = Field(default_factory=list, description="Job folders to look at; empty: all of the project")

    def measure(self, entries: Sequence[Entry], context: Context) -> list[float]:
        counts = usage.counts(context, self.folders)
        return scaled([float(counts[entry.number]) for entry in entries], 0.0)


class DiversityScore(Score):
    """Cosine distance of a row's n-gram counts to the nearest row chosen before it (farthest-first traversal).

    The first row is chosen first and scores 1; then, time and again, the row that is farthest from all chosen ones,
    which scores that distance (the greedy k-center order of Gonzalez 1985). So the best k rows by this score alone
    cover the others. After `centers` rows the rest score their distance to the nearest chosen row.
    """

    name: ClassVar[str] = "diversity"
    ngram: PositiveInt = Field(4, description="Characters of an n-gram")
    centers: PositiveInt = Field(1000, description="Rows chosen one by one; time grows with rows * centers")

    def measure(self, entries: Sequence[Entry], context: Context) -> list[float]:
        import numpy as np

        if not entries:
            return []
        found = (texts.gram_hashes(text, "character", self.ngram) for text in context.texts(entries))
        counts = [np.bincount((grams % np.uint64(_BUCKETS)).astype(np.int64), minlength=_BUCKETS) for grams in found]
        vectors = np.minimum(np.stack(counts), _MOST).astype(np.float32)
        squares = (vectors.astype(np.float64) ** 2).sum(axis=1)
        scores = np.zeros(len(vectors))
        distances, chosen, best = np.ones(len(vectors)), 0, 1.0
        for _ in range(min(self.centers, len(vectors))):
            scores[chosen] = best
            dots = (vectors @ vectors[chosen]).astype(np.float64)
            distances = np.minimum(distances, 1 - dots / np.sqrt(squares * squares[chosen]))
            chosen = int(np.argmax(distances))
            best = float(distances[chosen])
            if best <= 0:
                break
        return [float(value) for value in np.maximum(scores, distances)]


SCORES: dict[str, type[Score]] = {
    kind.name: kind for kind in (DifficultyScore, DiversityScore, UsageFrequencyScore, QualityScore)
}


def scaled(values: Sequence[float], low: float | None = None, high: float | None = None) -> list[float]:
    """(value - low) / (high - low), clipped to [0, 1]; 0 if all values are `low`."""
    if not values:
        return []
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    return [min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0 for value in values]


def _judged(entries: Sequence[Entry], key: str) -> list[float]:
    """The value that a data-juicer operator computed for every row; empty if one lacks it."""
    found = [entry.stats[key] for entry in entries if key in entry.stats]
    return scaled(found, 0.0, 1.0) if len(found) == len(entries) else []
