"""Scores of rows, each in [0, 1], over the rows that the operators kept.

With `column`, a score is (value - low) / (high - low), clipped. Null bounds are the least and the greatest value of the
rows; equal bounds score 0. Without `column`, the class has a formula. `reverse` makes the score 1 - score.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field, PositiveInt, model_validator

from trinity.config.schema.base import Section
from trinity.data.datasets import DatasetError, finite
from trinity.data.tables import column_value
from trinity.task_pipeline import texts, usage
from trinity.task_pipeline.base import Candidate, Context, Operator

_BUCKETS, _MOST = 256, 255  # 256 * 255^2 < 2^24: dot products are exact in float32 in any order of summation


class Score(Section):
    """Arguments that all scores have."""

    model_config = Operator.model_config
    name: ClassVar[str]
    floor: ClassVar[float | None] = None
    """Default of `low`; None is the least value."""

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

    def values(self, candidates: Sequence[Candidate], context: Context) -> list[float]:
        """One score in [0, 1] for each row. Raises DatasetError naming row and column."""
        if self.column is None:
            found = self.measure(candidates, context)
        else:
            floor = self.floor if self.low is None else self.low
            found = scaled([self.number(candidate, self.column) for candidate in candidates], floor, self.high)
        return [1 - value for value in found] if self.reverse else found

    def number(self, candidate: Candidate, column: str) -> float:
        there, value = column_value(candidate.row, column)
        found = finite(value)
        if found is None:
            what = f"is {value!r:.100}, must be a number" if there else "is missing, must be a number"
            raise DatasetError(f"row {candidate.number}: {column!r} {what}")
        return found

    def measure(self, candidates: Sequence[Candidate], context: Context) -> list[float]:
        """Scores by the formula of the class, without a column."""
        raise NotImplementedError


class DifficultyScore(Score):
    """ln(1 + characters), scaled to [0, 1], or the value of data-juicer's llm_difficulty_score_filter."""

    name: ClassVar[str] = "difficulty"
    levels: list[str | int | float] = Field(default_factory=list, description="Values of the column, easiest first")

    @model_validator(mode="after")
    def _levels_fit(self) -> "DifficultyScore":
        if self.levels and (self.column is None or self.low is not None or self.high is not None):
            raise ValueError("levels are values of a column, and take the place of low and high")
        if self.levels and len(self.levels) < 2:
            raise ValueError(f"levels is {self.levels}; a difficulty needs two at least")
        return self

    def number(self, candidate: Candidate, column: str) -> float:
        if not self.levels:
            try:
                return super().number(candidate, column)
            except DatasetError as error:
                raise DatasetError(f"{error.message}; levels gives an order to other values") from None
        value = column_value(candidate.row, column)[1]
        if value not in self.levels:
            raise DatasetError(f"row {candidate.number}: {column!r} is {value!r}, none of levels: {self.levels}")
        return self.levels.index(value) / (len(self.levels) - 1)

    def values(self, candidates: Sequence[Candidate], context: Context) -> list[float]:
        if not self.levels or self.column is None:
            return super().values(candidates, context)
        found = [self.number(candidate, self.column) for candidate in candidates]
        return [1 - value for value in found] if self.reverse else found

    def measure(self, candidates: Sequence[Candidate], context: Context) -> list[float]:
        judged = _judged(candidates, "llm_difficulty_score")
        return judged or scaled([math.log1p(len(text)) for text in context.texts(candidates)])


class QualityScore(Score):
    """texts.quality, or the value of data-juicer's llm_quality_score_filter."""

    name: ClassVar[str] = "quality"

    def measure(self, candidates: Sequence[Candidate], context: Context) -> list[float]:
        return _judged(candidates, "llm_quality_score") or [texts.quality(text) for text in context.texts(candidates)]


class UsageFrequencyScore(Score):
    """Number of times that earlier runs of the project trained a row, divided by the greatest such number."""

    name: ClassVar[str] = "usage_frequency"
    floor: ClassVar[float | None] = 0.0
    folders: list[str] = Field(default_factory=list, description="Job folders to look at; empty: all of the project")

    def measure(self, candidates: Sequence[Candidate], context: Context) -> list[float]:
        counts = usage.counts(context, self.folders)
        return scaled([float(counts[candidate.number]) for candidate in candidates], 0.0)


class DiversityScore(Score):
    """Cosine distance of a row's n-gram counts to the nearest row chosen before it (farthest-first traversal).

    The first row is chosen first and scores 1. Each next choice is the row farthest from all chosen rows, and scores
    that distance (the greedy k-center order of Gonzalez 1985), so the best k rows by this score cover the others. After
    `centers` choices, the other rows score their distance to the nearest chosen row.
    """

    name: ClassVar[str] = "diversity"
    ngram: PositiveInt = Field(4, description="Characters of an n-gram")
    centers: PositiveInt = Field(1000, description="Rows chosen one by one; time grows with rows * centers")

    def measure(self, candidates: Sequence[Candidate], context: Context) -> list[float]:
        import numpy as np

        if not candidates:
            return []
        found = (texts.gram_hashes(text, "character", self.ngram) for text in context.texts(candidates))
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
    """(value - low) / (high - low), clipped to [0, 1]. Zeros if all values are `low`."""
    if not values:
        return []
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    return [min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0 for value in values]


def _judged(candidates: Sequence[Candidate], key: str) -> list[float]:
    """The statistic that a data-juicer operator computed. Empty if a row lacks it."""
    found = [candidate.stats[key] for candidate in candidates if key in candidate.stats]
    return scaled(found, 0.0, 1.0) if len(found) == len(candidates) else []
