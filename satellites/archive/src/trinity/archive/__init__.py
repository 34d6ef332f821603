"""The archive: a copy of every group of the experience log, in a form that other programs read.

    open_archive(path, name, run) -> position -> append ... -> close
    read_experiences(path, name) -> groups again, for SFT, DPO and offline reinforcement learning

After a restart the log is archived from `position()` on. A group that is delivered twice is stored once, so no group is
missing or duplicated. All functions block. An archive takes one call at a time; the caller serializes its threads.
"""

from typing import Any

from trinity.archive.open import Archive, open_archive
from trinity.archive.reader import Experiences, holds_experiences, read_experiences
from trinity.archive.rows import check_row

__all__ = [
    "Archive", "Experiences", "check_row", "holds_experiences", "open_archive", "open_mirrors", "read_experiences",
]  # fmt: skip


def open_mirrors(*args: Any) -> list[Any]:
    """Opens the archives of a run's YAML, for its buffer (mirror.py)."""
    from trinity.archive.mirror import open_mirrors

    return open_mirrors(*args)
