"""Types of operators and scores: candidate rows, their inputs, and the context of an operator."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict, Field, model_validator

from trinity.config.schema.base import Section
from trinity.data.tables import DatasetError, Row, column_value
from trinity.task_pipeline import texts


@dataclass
class Candidate:
    """A row in the pipeline. `number` is its place in the input, from 0 over all files; it breaks all ties."""

    number: int
    row: Row
    stats: dict[str, float] = field(default_factory=dict)
    """Statistics computed by operators of data-juicer."""


@dataclass(frozen=True)
class Input:
    """One input file or folder. `split` and `subset` select files of a folder; they are empty for a file."""

    path: Path
    split: str
    subset: str
    digest: str
    """SHA-256 of the content."""
    first: int
    """Number of its first row, over all inputs."""
    rows: int
    changed: float
    """Latest modification of its files, in seconds since 1970."""


@dataclass(frozen=True)
class Context:
    """The run's settings that operators read besides the rows."""

    fields: tuple[str, ...]
    inputs: tuple[Input, ...] = ()
    project_dir: Path = Path()
    num_process: int = 1

    def texts(self, candidates: Sequence[Candidate], fields: Sequence[str] = ()) -> list[str]:
        """The text of each row: its fields, joined by newlines. Raises DatasetError for an unknown column."""
        wanted = tuple(fields) or self.fields
        for name in wanted:
            if candidates and not any(column_value(candidate.row, name)[0] for candidate in candidates):
                raise DatasetError(f"no row has a column {name!r}; they have {', '.join(candidates[0].row)}")
        return [
            "\n".join(texts.text_of(column_value(candidate.row, name)[1]) for name in wanted)
            for candidate in candidates
        ]


class Operator(Section):
    """A filter. Its fields are its arguments. Values are not converted to other types."""

    model_config = ConfigDict(strict=True)

    def apply(self, candidates: list[Candidate], context: Context) -> list[Candidate]:
        """The rows that the filter keeps. Raises DatasetError."""
        raise NotImplementedError


class TextFilter(Operator):
    """A filter that decides on each row by its text."""

    fields: list[str] = Field(default_factory=list, description="Columns to look at; empty: target_fields")

    @model_validator(mode="after")
    def _low_to_high(self) -> "TextFilter":
        for name, low in dict(self).items():
            high = getattr(self, name.replace("min_", "max_"), None)
            if name.startswith("min_") and high is not None and low > high:
                raise ValueError(f"{name} is {low}, more than {name.replace('min_', 'max_')} = {high}; no row is left")
        return self

    def apply(self, candidates: list[Candidate], context: Context) -> list[Candidate]:
        found = context.texts(candidates, self.fields)
        return [candidate for candidate, text in zip(candidates, found, strict=True) if self.keeps(text)]

    def keeps(self, text: str) -> bool:
        raise NotImplementedError
