"""Groups read back from archives, for offline algorithms."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, overload

from trinity.archive.jsonl import JsonlRows
from trinity.archive.rows import ExperienceRow, Kind, group_of, kind_of, needed_from
from trinity.data.experience import Group
from trinity.runtime.errors import InvalidInput


class RowReader(Protocol):
    """Reads rows of an archive by references to groups. The type of these references is private to the reader."""

    def groups(self) -> Sequence[Any]:
        """References to all groups, in order."""

    def rows(self, group: Any) -> list[tuple[str, ExperienceRow]]:
        """Rows of a group, each with its place for error messages."""

    def close(self) -> None: ...


class Experiences(Sequence[Group]):
    """Groups by index, read on access. Only references to them stay in memory."""

    def __init__(self, reader: RowReader, name: str) -> None:
        self._reader, self._name = reader, name
        self._groups = reader.groups()

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, index: int) -> Group: ...
    @overload
    def __getitem__(self, index: slice) -> list[Group]: ...
    def __getitem__(self, index: int | slice) -> Group | list[Group]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return group_of(self._reader.rows(self._groups[index]), f"{self._name}/{index}")

    def close(self) -> None:
        self._reader.close()


def read_experiences(path: str, name: str) -> Experiences:
    """The groups of an archive, or of a jsonl or parquet file written by hand.

    Args:
        path: as for open_archive; a parquet file too, or a folder of them.
        name: table of an SQL archive; for files it names groups that have no task.

    Rows of one (run, task_id, log_sequence) are a group. A row without task_id is a separate group. Required columns
    are token_ids, prompt_length (in tokens) and reward. Missing logprobs are 0, which only suits algorithms that use no
    log-probabilities (SFT, DPO). Without action_mask the whole response is trained. Unknown columns are ignored. Rows
    written by hand are all validated here, before training.

    Raises:
        InvalidInput: naming file, line or row, column, value and what it must be.
        Unavailable: the database does not answer.
    """
    reader = _reader(path, name)
    try:
        experiences = Experiences(reader, name)
        if not experiences:
            raise InvalidInput("path", f"{path} has no experiences")
    except BaseException:
        reader.close()
        raise
    return experiences


def holds_experiences(path: str, name: str) -> bool:
    """Returns True if a path has experience (a column token_ids), False for a dataset and for unreadable paths."""
    try:
        kind, place = kind_of(path), Path(path).expanduser()
    except InvalidInput:
        return False
    if kind is Kind.SQL:
        with needed_from("satellites/archive"):
            from trinity.archive.sql import columns_of as columns_of_table
        return "token_ids" in columns_of_table(path, name)
    if kind is Kind.PARQUET:
        with needed_from(".[parquet]"):
            from trinity.archive.parquet import columns_of as columns_of_files
        return "token_ids" in columns_of_files(place)
    if not place.is_file():
        return False
    with place.open(encoding="utf-8", errors="replace") as lines:
        return '"token_ids"' in lines.readline()


def _reader(path: str, name: str) -> RowReader:
    kind, place = kind_of(path), Path(path).expanduser()
    if kind is Kind.SQL:
        with needed_from("satellites/archive"):
            from trinity.archive.sql import SqlRows
        return SqlRows(path, name)
    if not place.exists():
        raise InvalidInput("path", f"{place} does not exist")
    if kind is Kind.PARQUET:
        with needed_from(".[parquet]"):
            from trinity.archive.parquet import ParquetRows
        return ParquetRows(place)
    return JsonlRows(place)
