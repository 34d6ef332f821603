"""Opens the archive of a run for writing, of any kind."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from trinity.archive.jsonl import JsonlArchive
from trinity.archive.rows import Kind, check_table_name, kind_of, needed_from
from trinity.data.experience import Group
from trinity.runtime.errors import InvalidInput


class Archive(Protocol):
    """The archived groups of one run."""

    def position(self) -> int:
        """The log sequence up to which everything is archived; 0 for an empty archive.

        The archive itself stores it. SQL stores it exactly. After a restart, files have the position of the last group
        (jsonl) or the last part (parquet), and not that of later entries without a group.
        """

    def append(self, groups: Sequence[tuple[int, Group]], position: int) -> None:
        """Store groups by log sequence, durably, all or none, and advance the position.

        Groups at or below `position()` are already archived and skipped. Raises ValueError unless the sequences rise
        and end at or below `position`, and Unavailable (database) or OSError (file) if they cannot be stored now.
        """

    def close(self) -> None: ...


def open_archive(path: str, name: str, run: str) -> Archive:
    """Open the archive that a path names, or create it.

    Args:
        path: a URL (sqlite:///file.db, postgresql://user:password@host/database); a file .db, .sqlite or .jsonl;
            or a folder for parquet, ending in .parquet or /.
        name: the buffer's name. In SQL, the tables are `<name>` and `<name>_position`.
        run: the run's id. In SQL and parquet several runs may share an archive, a jsonl file is of one.

    Raises:
        InvalidInput: the path is none of these, or has other content, which is not changed.
        Conflict: another process writes this file or folder.
        Unavailable: the database does not answer.
    """
    if not run:
        raise InvalidInput("run", "is empty; an archive keeps the groups of a run under its id")
    kind, place = kind_of(path), Path(path).expanduser()
    if kind is Kind.SQL:
        check_table_name(name)
        with needed_from("satellites/archive"):
            from trinity.archive.sql import SqlArchive
        return SqlArchive(path, name, run)
    if kind is Kind.PARQUET:
        with needed_from(".[parquet]"):
            from trinity.archive.parquet import ParquetArchive
        return ParquetArchive(place, run)
    return JsonlArchive(place, run)
