"""The archive as parquet: a folder with one part for each append, `<run>.<first sequence>-<position>.parquet`.

A part is written to a temporary file, synced and renamed, so it is complete or absent. The newest part's name has the
position. Several runs may share a folder.
"""

import io
import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow
from pyarrow import parquet

from trinity.archive.jsonl import lock
from trinity.archive.rows import (
    ARRAYS,
    COLUMNS,
    LATER,
    OBJECTS,
    TYPES,
    ExperienceRow,
    check_row,
    grouped,
    not_archived,
    rows_of,
)
from trinity.data.experience import Group
from trinity.runtime import files
from trinity.runtime.errors import InvalidInput

_PART = re.compile(r"(?P<run>.+)\.(?P<first>\d{19})-(?P<position>\d{19})\.parquet")
_ROWS_READ_AT_ONCE = 64
_GROUP_COLUMNS = ("run", "task_id", "log_sequence", "rollout", "step")

_TYPES = {
    "text": pyarrow.string(),
    "json": pyarrow.string(),
    "int32": pyarrow.int32(),
    "int64": pyarrow.int64(),
    "float64": pyarrow.float64(),
    **{dtype: pyarrow.list_(pyarrow.from_numpy_dtype(dtype)) for dtype in ARRAYS.values()},
}
SCHEMA = pyarrow.schema([(column, _TYPES[kind]) for column, kind in TYPES.items()])
_OLDER = SCHEMA.remove(SCHEMA.get_field_index(LATER))


class ParquetArchive:
    """The parts of one run in a folder. Each append writes a file, so it should have many groups.

    After a restart, `position` is the position of the last append with groups.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run, self._prefix = folder, run, quote(run, safe="")
        if folder.exists() and not folder.is_dir():
            raise InvalidInput("path", f"{folder} is a file; a parquet archive is a folder; name another one")
        folder.mkdir(parents=True, exist_ok=True)
        self._position = self._newest_position()
        self._lock = lock(folder / f".{self._prefix}.lock")
        self._position = self._newest_position()  # the lock is held: no other process adds parts
        for torn in folder.glob(f".{self._prefix}.*.parquet.*"):
            torn.unlink()

    def position(self) -> int:
        return self._position

    def append(self, groups: Sequence[tuple[int, Group]], position: int) -> None:
        new = not_archived(groups, self._position, position)
        if new:
            name = f"{self._prefix}.{new[0][0]:019d}-{position:019d}.parquet"
            files.write_atomic(self._folder / name, _part(rows_of(self._run, new)))
        self._position = max(position, self._position)

    def close(self) -> None:
        self._lock.release()

    def _newest_position(self) -> int:
        """The position of the run's newest part. Raises InvalidInput for a folder with files of other programs."""
        newest, newest_part = 0, None
        for path in self._folder.iterdir():
            if path.name.startswith("."):
                continue
            part = _PART.fullmatch(path.name)
            if part is None:
                problem = f"{self._folder} holds {path.name}, no part of an archive; name a new folder"
                raise InvalidInput("path", problem)
            if part["run"] == self._prefix and int(part["position"]) > newest:
                newest, newest_part = int(part["position"]), path
        if newest_part is not None and not _is_archived(_open(newest_part)):
            raise InvalidInput("path", f"{newest_part} has other columns than an archive; name a new folder")
        return newest


class ParquetRows:
    """The rows of a parquet file or of all files of a folder, by number from 0. A few row groups are in memory."""

    def __init__(self, path: Path) -> None:
        self._files = sorted(path.glob("[!.]*.parquet")) if path.is_dir() else [path]
        if not self._files:
            raise InvalidInput("path", f"{path} has no .parquet files")
        self._starts: list[int] = []  # number of the first row of each row group
        self._places: list[tuple[Path, int, int]] = []  # file, row group, rows of the file before it
        self._read = lru_cache(maxsize=4)(lambda file, row_group: _open(file).read_row_group(row_group))

    def close(self) -> None:
        self._read.cache_clear()

    def groups(self) -> list["array[int]"]:
        """Row numbers of each group. Raises InvalidInput for a row that is no experience, or is there twice."""
        return grouped(self._index(), self._place)

    def rows(self, group: Sequence[int]) -> list[tuple[str, ExperienceRow]]:
        """Rows of a group with their places."""
        return [self._row(row_number) for row_number in group]

    def _row(self, row_number: int) -> tuple[str, ExperienceRow]:
        at = bisect_right(self._starts, row_number) - 1
        file, row_group, _ = self._places[at]
        return self._place(row_number), _row(self._read(file, row_group), row_number - self._starts[at])

    def _place(self, row_number: int) -> str:
        at = bisect_right(self._starts, row_number) - 1
        file, _, before = self._places[at]
        return f"{file} row {before + row_number - self._starts[at]}"

    def _index(self) -> Iterator[tuple[int, ExperienceRow]]:
        total = 0
        for file in self._files:
            opened, before = _open(file), 0
            for row_group in range(opened.num_row_groups):
                self._starts.append(total)
                self._places.append((file, row_group, before))
                for key in _keys(opened, row_group, f"{file} row", before):
                    yield total, key
                    total, before = total + 1, before + 1


def _part(rows: list[dict[str, Any]]) -> bytes:
    columns = {column: [row[column] for row in rows] for column in COLUMNS}
    for column in OBJECTS:
        columns[column] = [json.dumps(value) for value in columns[column]]
    sink = io.BytesIO()
    table = pyarrow.table(columns, schema=SCHEMA)
    parquet.write_table(table, sink, compression="zstd", row_group_size=_ROWS_READ_AT_ONCE)
    return sink.getvalue()


def _open(file: Path) -> Any:
    try:
        return parquet.ParquetFile(file)
    except (OSError, ValueError) as error:  # base classes of pyarrow's errors
        raise InvalidInput("path", f"{file} cannot be read as parquet: {error}") from None


def _is_archived(opened: Any) -> bool:
    return bool(opened.schema_arrow.equals(SCHEMA) or opened.schema_arrow.equals(_OLDER))


def _keys(opened: Any, row_group: int, place: str, before: int) -> Iterator[ExperienceRow]:
    """The columns that identify the group of each row. Rows written by hand are validated in full."""
    if _is_archived(opened):
        yield from opened.read_row_group(row_group, columns=list(_GROUP_COLUMNS)).to_pylist()
        return
    table = opened.read_row_group(row_group)
    for number in range(table.num_rows):
        row = _row(table, number)
        check_row(row, f"{place} {before + number}")
        yield {column: row.get(column) for column in _GROUP_COLUMNS}


def _row(table: Any, number: int) -> ExperienceRow:
    return {column: _value(table[column][number], column) for column in table.column_names}


def _value(scalar: Any, column: str) -> Any:
    is_list = pyarrow.types.is_list(scalar.type) or pyarrow.types.is_large_list(scalar.type)
    if column in ARRAYS and is_list and scalar.is_valid and not scalar.values.null_count:
        return scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


def columns_of(path: Path) -> set[str]:
    """Column names of a parquet file, or of the first file in a folder. Returns an empty set without a file."""
    files = sorted(path.glob("[!.]*.parquet")) if path.is_dir() else [path]
    return set(parquet.read_schema(files[0]).names) if files and files[0].is_file() else set()
