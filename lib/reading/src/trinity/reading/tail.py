"""Big files that are read from their end, and growing files.

A line counts once its newline is written; the rest after the last newline is unfinished, or was cut off by a crash. A
`GrowingFile` is read backwards or forwards as it was when it was opened, and then on through rotation and truncation:
each line once, none skipped.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_BLOCK = 128 * 1024


def whole_end(file: BinaryIO) -> int:
    """Returns the bytes up to and including the last newline."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - _BLOCK)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0


def lines_backwards(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Yields the lines before `end` (a `whole_end`), last first, without newlines. Reads lazily."""
    if end == 0:
        return
    position = end - 1
    pieces: list[bytes] = []  # of a line longer than a block, the last first
    while position > 0:
        start = max(0, position - _BLOCK)
        file.seek(start)
        head, *lines = file.read(position - start).split(b"\n")
        position = start
        if lines:
            yield lines.pop() + b"".join(reversed(pieces))
            yield from reversed(lines)
            pieces = []
        pieces.append(head)
    yield b"".join(reversed(pieces))


def lines_forwards(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Yields the lines before `end` (a `whole_end`), first to last, without newlines."""
    position, pieces = 0, [b""]
    while position < end:
        file.seek(position)
        block = file.read(min(_BLOCK, end - position))
        if not block:  # truncated meanwhile
            return
        position += len(block)
        head, *lines = block.split(b"\n")
        pieces.append(head)
        if lines:
            yield b"".join(pieces)
            pieces = [lines.pop()]
            yield from lines


class GrowingFile:
    """A file that others append to, truncate or rotate: `<path>.1` is the previous one, `<path>.2` the one before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open(path)
        self._end = whole_end(self._file) if self._file else 0

    def backwards(self) -> Iterator[bytes]:
        """Yields the lines at the time of opening, last first."""
        if self._file:
            yield from lines_backwards(self._file, self._end)
        for file in self._older():
            with file:
                yield from lines_backwards(file, whole_end(file))

    def forwards(self) -> Iterator[bytes]:
        """Yields the lines at the time of opening, first to last."""
        for file in reversed(list(self._older())):
            with file:
                yield from lines_forwards(file, whole_end(file))
        if self._file:
            yield from lines_forwards(self._file, self._end)

    def new_lines(self) -> list[bytes]:
        """Returns lines since the last call; at first since the file was opened."""
        newer = self._newer()
        lines = self._read_on()  # after looking for newer ones: a file that was rotated away gets no more lines
        for file in newer:
            if self._file:
                self._file.close()
            self._file, self._end = file, 0
            lines += self._read_on()
        return lines

    def _read_on(self) -> list[bytes]:
        if self._file is None:
            return []
        if os.fstat(self._file.fileno()).st_size < self._end:  # truncated
            self._end = 0
        self._file.seek(self._end)
        whole, newline, _ = self._file.read().rpartition(b"\n")
        if not newline:
            return []
        self._end += len(whole) + 1
        return whole.split(b"\n")

    def _older(self) -> Iterator[BinaryIO]:
        """Yields rotated files, newest first. A file that a rotation shows under two names counts once."""
        seen = [_identity(self._file)] if self._file else []
        number = 1
        while (file := _open(self._rotated(number))) is not None:
            number += 1
            if _identity(file) in seen:
                file.close()
            else:
                seen.append(_identity(file))
                yield file

    def _newer(self) -> list[BinaryIO]:
        """Returns the files that replaced this one, oldest first; empty while it is in place."""
        found: list[BinaryIO] = []
        number = 0
        while (file := _open(self._rotated(number))) is not None:
            number += 1
            if self._file is not None and _identity(file) == _identity(self._file):
                file.close()
                return found[::-1]
            if _identity(file) in map(_identity, found):  # a rotation in between showed it under two names
                file.close()
            else:
                found.append(file)
            if self._file is None:
                return found
        for older in found[1:]:  # ours is gone, so these may hold what was shown; the file of today does not
            older.close()
        return found[:1]

    def _rotated(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path


def _open(path: Path) -> BinaryIO | None:
    """Opens without a buffer, which would still hold the content before a truncation."""
    try:
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        return None


def _identity(file: BinaryIO) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino
