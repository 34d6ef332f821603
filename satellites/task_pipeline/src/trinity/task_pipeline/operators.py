"""Filters by length, column, quality and chance.

text_length_filter, words_num_filter and alphanumeric_filter have the meaning and the defaults of data-juicer's.
"""

import math
import random
from collections.abc import Callable
from fractions import Fraction
from operator import eq, ge, gt, le, lt, ne
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from trinity.data.datasets import DatasetError
from trinity.data.tables import column_value
from trinity.task_pipeline import texts
from trinity.task_pipeline.base import Candidate, Context, Operator, TextFilter

Comparison = Literal["==", "!=", "<", "<=", ">", ">=", "in", "contains", "exists"]
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {"==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}


class TextLengthFilter(TextFilter):
    """Rows of min_len to max_len characters."""

    min_len: NonNegativeInt = 10
    max_len: NonNegativeInt | None = None

    def keeps(self, text: str) -> bool:
        return self.min_len <= len(text) and (self.max_len is None or len(text) <= self.max_len)


class WordsNumFilter(TextFilter):
    """Rows of min_num to max_num words; words are separated by white space."""

    min_num: NonNegativeInt = 10
    max_num: NonNegativeInt | None = None

    def keeps(self, text: str) -> bool:
        words = len(text.split())
        return self.min_num <= words and (self.max_num is None or words <= self.max_num)


class AlphanumericFilter(TextFilter):
    """Rows whose share of letters and digits in all characters is within [min_ratio, max_ratio]."""

    min_ratio: float = Field(0.25, ge=0, le=1)
    max_ratio: float = Field(1.0, ge=0, le=1)

    def keeps(self, text: str) -> bool:
        return self.min_ratio <= texts.alphanumeric_share(text) <= self.max_ratio


class SymbolsFilter(TextFilter):
    """Rows whose share of symbols is at most max_ratio."""

    max_ratio: float = Field(0.4, ge=0, le=1)

    def keeps(self, text: str) -> bool:
        return texts.symbol_share(text) <= self.max_ratio


class RepetitionFilter(TextFilter):
    """Rows with a share of repeated n-grams of at most max_ratio."""

    unit: texts.Unit = "word"
    ngram: PositiveInt = 3
    max_ratio: float = Field(0.5, ge=0, le=1)

    def keeps(self, text: str) -> bool:
        return texts.repeated_share(text, self.unit, self.ngram) <= self.max_ratio


class FieldFilter(Operator):
    """Rows with `column` `op` `value`. A missing column or null matches only `!=`."""

    column: str = Field(min_length=1)
    op: Comparison = "=="
    value: Any = None

    @model_validator(mode="after")
    def _value_fits(self) -> "FieldFilter":
        if self.op == "exists":
            if self.value is not None and not isinstance(self.value, bool):
                raise ValueError(f"value is {self.value!r}; exists takes true or false")
        elif self.value is None:
            raise ValueError(f"value is missing; {self.op!r} compares with it")
        elif self.op == "in" and not isinstance(self.value, list):
            raise ValueError(f"value is {self.value!r}; in takes a list")
        return self

    def apply(self, candidates: list[Candidate], context: Context) -> list[Candidate]:
        if candidates and self.op != "exists" and not any(column_value(e.row, self.column)[0] for e in candidates):
            raise DatasetError(f"no row has a column {self.column!r}; they have {', '.join(candidates[0].row)}")
        return [candidate for candidate in candidates if self._keeps(candidate)]

    def _keeps(self, candidate: Candidate) -> bool:
        _, found = column_value(candidate.row, self.column)
        if self.op == "exists":
            return (found is not None) is (self.value is not False)
        if found is None:
            return self.op == "!="
        try:
            if self.op == "in":
                return found in self.value
            return self.value in found if self.op == "contains" else bool(_COMPARE[self.op](found, self.value))
        except TypeError:
            what = f"is {found!r}, which cannot be compared: {self.op} {self.value!r}"
            raise DatasetError(f"row {candidate.number}: {self.column!r} {what}") from None


class Sample(Operator):
    """`size` rows, or the share `ratio`, drawn at random without replacement. They keep their order."""

    size: PositiveInt | None = None
    ratio: float | None = Field(None, gt=0, le=1)
    seed: int = 42

    @model_validator(mode="after")
    def _one_of_both(self) -> "Sample":
        if (self.size is None) is (self.ratio is None):
            raise ValueError("needs either size or ratio")
        return self

    def apply(self, candidates: list[Candidate], context: Context) -> list[Candidate]:
        share = Fraction(str(self.ratio or 0))  # 0.07 * 100 is more than 7
        size = self.size if self.size is not None else math.ceil(share * len(candidates))
        chosen = random.Random(self.seed).sample(range(len(candidates)), min(size, len(candidates)))
        return [candidates[index] for index in sorted(chosen)]
