"""Operators by their names in the YAML. Plugins may add to OPERATORS."""

from typing import Any

from trinity.config.schema.base import Section
from trinity.task_pipeline.base import Operator
from trinity.task_pipeline.duplicates import ExactDedup, NearDedup
from trinity.task_pipeline.operators import (
    AlphanumericFilter,
    FieldFilter,
    RepetitionFilter,
    Sample,
    SymbolsFilter,
    TextLengthFilter,
    WordsNumFilter,
)
from trinity.task_pipeline.scores import SCORES, Score

OPERATORS: dict[str, type[Operator]] = {
    "text_length_filter": TextLengthFilter,
    "words_num_filter": WordsNumFilter,
    "field_filter": FieldFilter,
    "alphanumeric_filter": AlphanumericFilter,
    "symbols_filter": SymbolsFilter,
    "repetition_filter": RepetitionFilter,
    "exact_dedup": ExactDedup,
    "near_dedup": NearDedup,
    "sample": Sample,
}

# Not applied in the order of operators: they configure the scores of priority_weights.
SCORE_OPERATORS: dict[str, type[Score]] = {f"{name}_score": kind for name, kind in SCORES.items()}


def known() -> dict[str, type[Section]]:
    """All operators without data-juicer's, by name."""
    return {**OPERATORS, **SCORE_OPERATORS}


def operator_args() -> dict[str, dict[str, Any]]:
    """Name -> arguments and their defaults. A required argument has None."""
    return {
        name: {key: field.get_default(call_default_factory=True, validated_data={}) if not field.is_required() else None
               for key, field in kind.model_fields.items()}
        for name, kind in known().items()
    }  # fmt: skip
