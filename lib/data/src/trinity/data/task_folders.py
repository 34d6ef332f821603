"""Folders of tasks in Harbor's form, as rows: https://www.harborframework.com/docs/tasks.

A task is a folder with `task.toml`, `instruction.md`, `tests/test.sh`, and often `environment/` and `solution/`. A row
has the content of all files, so machines without the folder can play it.
"""

import base64
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity.data.tables import DatasetError, Row

MARK = "task.toml"
_FOLDERS = ("environment", "tests", "solution")
_MOST_BYTES = 4 * 1024**2


def task_folders(place: Path, split: str) -> list[Path]:
    """Folders of <place>/<split>/*/task.toml, else of <place>/*/task.toml. Empty for another kind of folder."""
    for parent in (place / split, place):
        if found := sorted(path.parent for path in parent.glob(f"*/{MARK}")):
            return found
    return []


def read_task(folder: Path) -> Row:
    """{task, instruction, config, environment, tests, solution}; the last three are lists of files.

    A file is {path, text or base64, executable}. Raises DatasetError naming the file.
    """
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise DatasetError(f"{folder}: has no {name}; a task in Harbor's form needs one")
    try:
        config = tomllib.loads((folder / MARK).read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:  # includes errors of TOML and UTF-8
        raise DatasetError(f"{folder}: {MARK} or instruction.md cannot be read: {error}") from None
    row: Row = {"task": folder.name, "instruction": instruction, "config": config}
    left = _MOST_BYTES
    for name in _FOLDERS:
        row[name] = list(_files(folder / name))
        left -= sum(len(file.get("text", "")) + len(file.get("base64", "")) for file in row[name])
    if left < 0:
        raise DatasetError(f"{folder}: its files have more than {_MOST_BYTES >> 20} MiB, the most of one row")
    return row


def _files(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise DatasetError(f"{path}: is a symbolic link; tasks have plain files")
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        if path.stat().st_size > _MOST_BYTES:
            raise DatasetError(f"{path}: has more than {_MOST_BYTES >> 20} MiB, the most of one row")
        data = path.read_bytes()
        executable = bool(path.stat().st_mode & 0o100)
        file: dict[str, Any] = {"path": str(path.relative_to(folder)), "executable": executable}
        try:
            file["text"] = data.decode()
        except UnicodeDecodeError:
            file["base64"] = base64.b64encode(data).decode()
        yield file
