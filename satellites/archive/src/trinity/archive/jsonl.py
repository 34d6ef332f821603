"""The archive as JSON lines: one experience per line, the groups of one run in log order.

An append is one write at the end, then fsync. A crash may leave a torn group at the end. Opening the file cuts it off,
so the last line always ends a group, and its log_sequence is the position.
"""

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trinity.archive.rows import (
    COLUMNS,
    OLDER_COLUMNS,
    ExperienceRow,
    check_row,
    grouped,
    not_archived,
    number,
    rows_of,
)
from trinity.data.experience import Group
from trinity.runtime import files
from trinity.runtime.errors import Conflict, InvalidInput
from trinity.runtime.process import FileLock

_BLOCK = 1 << 20
_BEGIN = b'{"run":'
_HEAD_END = b',"token_ids":'  # columns before it identify a row; arrays and texts follow


def lock(path: Path) -> FileLock:
    """The lock of an archive's writer. Raises Conflict if another process holds it."""
    held = FileLock(path)
    if not held.acquire():
        raise Conflict(f"{path}: process {held.owner()} writes this archive; two writers would mix their groups")
    return held


class JsonlArchive:
    """One file. After a restart `position` is the last group's; later log entries are delivered again."""

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._run = path, run
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = lock(path.with_name(f".{path.name}.lock"))
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            files.sync_folder(path.parent)
            self._position = self._repair()
        except BaseException:
            self.close()
            raise

    def position(self) -> int:
        return self._position

    def append(self, groups: Sequence[tuple[int, Group]], position: int) -> None:
        new = not_archived(groups, self._position, position)
        content = b"".join(_line(row) for row in rows_of(self._run, new))
        if content:
            self._write(content)
        self._position = max(position, self._position)

    def close(self) -> None:
        os.close(self._handle)
        self._lock.release()

    def _write(self, content: bytes) -> None:
        end = os.fstat(self._handle).st_size
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(self._handle, rest) :]
            os.fsync(self._handle)
        except OSError:  # a full disk: all or nothing
            os.ftruncate(self._handle, end)
            raise

    def _repair(self) -> int:
        """Cut off the bytes after the last whole group. Returns its log sequence."""
        self._check_first_line()
        size = os.fstat(self._handle).st_size
        end, sequence = self._last_whole_group(size)
        if end < size:
            os.ftruncate(self._handle, end)
        if end and os.pread(self._handle, 1, end - 1) != b"\n":
            os.write(self._handle, b"\n")
        os.fsync(self._handle)
        return sequence

    def _check_first_line(self) -> None:
        line, whole, _ = os.pread(self._handle, _BLOCK, 0).partition(b"\n")
        if (whole and _parsed(line) is None) or not self._written_here(line):
            raise self._foreign(0)

    def _last_whole_group(self, size: int) -> tuple[int, int]:
        """The end of the last whole group, in bytes, and its log sequence. At most one group may be torn."""
        torn = None
        for start, line in _lines_from_the_end(self._handle, size):
            row = _parsed(line)
            if row is not None and row["index_in_group"] == row["group_size"] - 1 and row["run"] == self._run:
                return start + len(line), row["log_sequence"]
            if not self._written_here(line) or (row is None and _json(line) is not None):
                raise self._foreign(start)
            if row is not None and torn not in (None, row["log_sequence"]):
                raise self._foreign(start)
            torn = row["log_sequence"] if row is not None else torn
        return 0, 0

    def _foreign(self, start: int) -> InvalidInput:
        """The error for content that this archive did not write. Such a file is never changed."""
        return InvalidInput(
            "path", f"{self._path} at byte {start}: was not archived by run {self._run} as it is; name another file"
        )

    def _written_here(self, line: bytes) -> bool:
        """Returns True if a line, perhaps torn, begins like this archive's. A power cut may leave zero bytes."""
        head = _BEGIN + _dumps(self._run) + b',"log_sequence":'
        line = line.partition(b"\0")[0].rstrip(b"\n")
        return line.startswith(head) or head.startswith(line)


class JsonlRows:
    """The rows of a file, numbered from 0 like its lines. The file stays open; no line is kept in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._starts = array("q", [0])

    def close(self) -> None:
        self._file.close()

    def groups(self) -> list["array[int]"]:
        """Row numbers of each group. Raises InvalidInput for a row that is no experience, or is there twice."""
        return grouped(self._index(), self._place)

    def rows(self, group: Sequence[int]) -> list[tuple[str, ExperienceRow]]:
        """Rows of a group with their places."""
        return [self._row(row_number) for row_number in group]

    def _row(self, row_number: int) -> tuple[str, ExperienceRow]:
        start, end = self._starts[row_number], self._starts[row_number + 1]
        place = self._place(row_number)
        return place, _object(os.pread(self._file.fileno(), end - start, start), place)

    def _place(self, row_number: int) -> str:
        return f"{self._path} line {row_number + 1}"

    def _index(self) -> Iterator[tuple[int, ExperienceRow]]:
        for row_number, line in enumerate(iter(self._file.readline, b"")):
            self._starts.append(self._starts[-1] + len(line))
            if line.strip() and not _is_being_written(line):
                yield row_number, _head(line) or _checked(line, self._place(row_number))


def _line(row: dict[str, Any]) -> bytes:
    plain = row | {
        "reward": number(row["reward"]),
        "token_ids": row["token_ids"].tolist(),
        "logprobs": _short(row["logprobs"]),
        "action_mask": row["action_mask"].tolist(),
        "teacher_logprobs": None if row["teacher_logprobs"] is None else _short(row["teacher_logprobs"]),
        "started_at_seconds": number(row["started_at_seconds"]),
        "finished_at_seconds": number(row["finished_at_seconds"]),
    }
    return _dumps(plain) + b"\n"


def _short(values: np.ndarray) -> list[float | str]:
    """float32 numbers as doubles that round to the same float32, with nine decimals where these suffice."""
    exact = values.astype(np.float64)
    rounded = np.round(exact, 9)
    numbers = np.where(rounded.astype(np.float32) == values, rounded, exact).tolist()
    return numbers if np.isfinite(values).all() else [number(value) for value in numbers]


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _json(text: bytes) -> Any:
    """The parsed value. Returns None for text that is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line as a row of an archive. Returns None for other lines."""
    row = _json(line)
    return row if isinstance(row, dict) and tuple(row) in (COLUMNS, OLDER_COLUMNS) else None


def _is_being_written(line: bytes) -> bool:
    """Returns True for an incomplete last line, whose run is still writing the archive."""
    begins = line[: len(_BEGIN)] == _BEGIN[: len(line)]
    return begins and not line.endswith(b"\n") and _json(line) is None


def _head(line: bytes) -> ExperienceRow | None:
    """The columns of an archive's row that identify its group, without parsing the rest. None for other rows."""
    head, found, _ = line.partition(_HEAD_END)
    row = _json(head + b"}") if found else None
    return row if row and "task_id" in row and tuple(row) == COLUMNS[: len(row)] else None


def _checked(line: bytes, place: str) -> ExperienceRow:
    row = _object(line, place)
    check_row(row, place)
    return row


def _object(line: bytes, place: str) -> ExperienceRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(place, f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InvalidInput(place, f"is {type(row).__name__}, must be a JSON object with one experience")
    return row


def _lines_from_the_end(handle: int, size: int) -> Iterator[tuple[int, bytes]]:
    """(offset, line with its newline) of a file's lines, from the last to the first."""
    start, read = size, b""
    while start or read:
        newline = read.rfind(b"\n", 0, max(0, len(read) - 1))
        if newline < 0 and start:
            before = max(0, start - _BLOCK)
            read = os.pread(handle, start - before, before) + read
            start = before
            continue
        yield start + newline + 1, read[newline + 1 :]
        read = read[: newline + 1]
