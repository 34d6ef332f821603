"""Files for tests: written whole, or counted as they are read."""

import io
from pathlib import Path
from typing import Any


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(lines)
    return path


class Counting(io.FileIO):
    """A file that counts the bytes read from it."""

    bytes_read = 0

    def read(self, size: int | None = -1) -> Any:
        data = super().read(size)
        Counting.bytes_read += len(data or b"")
        return data
