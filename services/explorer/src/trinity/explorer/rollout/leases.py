"""The leases that this explorer holds, in a file: its successor returns those of a dead process at once.

Without the file they end TASK_LEASE_SECONDS after the process, and the step that needs their groups waits as long.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import structlog

from trinity.runtime.names import TASK_LEASE_SECONDS
from trinity.runtime.process import FileLock

log = structlog.get_logger(__name__)


class Leases:
    """take_over -> keep ... Only the one process of an explorer's name that has the lock reads and writes the file."""

    def __init__(self, folder: Path | None, explorer_id: str) -> None:
        """`folder`: on this machine; None keeps no file."""
        self._file = folder / f"leases-{explorer_id}.json" if folder is not None else None
        self._lock: FileLock | None = None  # until this process ends
        self._held: dict[str, list[str]] = {}

    def take_over(self) -> list[str]:
        """Returns what the process before this one held when it died.

        An old file says nothing: its leases have ended, and others may hold the tasks, whose leases would go, too.
        """
        if self._file is None:
            return []
        lock, left = FileLock(self._file.with_suffix(".lock")), list[str]()
        with contextlib.suppress(OSError):  # of a file system without locks: then no file is kept
            if lock.acquire():
                self._lock = lock
        if self._lock is None:
            log.warning("explorer.leases.unkept", file=str(self._file), reason="another process has the lock")
            return []
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # the file is missing or damaged
            if time.time() - self._file.stat().st_mtime < TASK_LEASE_SECONDS:
                left = [str(lease) for leases in json.loads(self._file.read_text()).values() for lease in leases]
        self._write()
        return left

    def keep(self, stream: str, leases: Iterable[str]) -> None:
        """Note all leases of a stream that are held now: at each change, and when they are renewed."""
        self._held[stream] = list(leases)
        self._write()

    def _write(self) -> None:
        if self._file is None or self._lock is None:
            return
        new = self._file.with_suffix(".new")
        with contextlib.suppress(OSError):  # of a full disk: then the leases end by their time
            new.write_text(json.dumps(self._held))
            os.replace(new, self._file)
