"""Types of operators and scores: rows with their numbers, and what an operator may know of the run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from trinity.config.schema.base import Section
from trinity.data.datasets import DatasetError, Row
from trinity.data.task_pipeline import texts


@dataclass
class Entry:
    """A row on its way. `number` is its place in the input, from 0 over all files; it decides every tie."""

    number: int
    row: Row
    stats: dict[str, float] = field(default_factory=dict)
    """Statistics that operators of data-juicer computed for it."""


@dataclass(frozen=True)
class Input:
    """One file or folder that rows came from. `split` and `subset` choose in a folder; empty for a file."""

    path: Path
    split: str
    subset: str
    digest: str
    """SHA-256 of the content."""
    first: int
    """Number of its first row, over all inputs."""
    rows: int
    changed: float
    """When a file of it was last written, in seconds since 1970."""


@dataclass(frozen=True)
class Context:
    """What an operator may know besides the rows."""

    fields: tuple[str, ...]
    inputs: tuple[Input, ...] = ()
    project_dir: Path = Path()
    num_process: int = 1

    def texts(self, entries: Sequence[Entry], fields: Sequence[str] = ()) -> list[str]:
        """The text of each row: its target fields, joined by newlines. Raises DatasetError for an unknown column."""
        wanted = tuple(fields) or self.fields
        for name in wanted:
            if entries and not any(name in entry.row for entry in entries):
                raise DatasetError(f"no row has a column {name!r}; they have {', '.join(entries[0].row)}")
        return ["\n".join(texts.text_of(entry.row.get(name)) for name in wanted) for entry in entries]


class Operator(Section):
    """A filter. Its fields are its arguments; a value is never converted to another type."""

    model_config = ConfigDict(strict=True)

    def apply(self, entries: list[Entry], context: Context) -> list[Entry]:
        """The rows that stay. Raises DatasetError."""
        raise NotImplementedError


class TextFilter(Operator):
    """A filter that decides by the text of each row alone."""

    fields: list[str] = Field(default_factory=list, description="Columns to look at; empty: target_fields")

    @model_validator(mode="after")
    def _low_to_high(self) -> "TextFilter":
        for name, low in dict(self).items():
            high = getattr(self, name.replace("min_", "max_"), None)
            if name.startswith("min_") and high is not None and low > high:
                raise ValueError(f"{name} is {low}, more than {name.replace('min_', 'max_')} = {high}; no row is left")
        return self

    def apply(self, entries: list[Entry], context: Context) -> list[Entry]:
        found = context.texts(entries, self.fields)
        return [entry for entry, text in zip(entries, found, strict=True) if self.keeps(text)]

    def keeps(self, text: str) -> bool:
        raise NotImplementedError


def column_value(row: Row, column: str) -> tuple[bool, Any]:
    """Whether a row has a column, and its value. `a.b` is column `a.b`, or else `b` inside column `a`."""
    if column in row:
        return True, row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value
