"""The leases that this explorer holds, in a file: its successor returns those of a killed process at once.

Without the file they end TASK_LEASE_SECONDS after the process, and the step that needs their groups waits as long.
"""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

import structlog

from trinity.runtime.broker import Broker, return_leases
from trinity.runtime.process import FileLock

log = structlog.get_logger(__name__)


class Leases:
    """take_over -> keep ... One live process of an explorer's name writes the file; another one only has its leases."""

    def __init__(self, folder: Path | None, explorer_id: str) -> None:
        """`folder`: on this machine; None keeps no file."""
        self._file = folder / f"leases-{explorer_id}.json" if folder is not None else None
        self._held: dict[str, list[str]] = {}

    async def take_over(self, broker: Broker) -> None:
        """Return what the process before this one held."""
        if self._file is None:
            return
        lock = FileLock(self._file.with_suffix(".lock"))
        if not lock.acquire():
            log.warning("explorer.leases.unkept", file=str(self._file), reason="another process of this name is alive")
            self._file = None
            return
        self._lock = lock  # until this process ends
        left: list[str] = []
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # none, or killed while it wrote
            left = [str(lease) for leases in json.loads(self._file.read_text()).values() for lease in leases]
        if left:
            await return_leases(broker, left)
            log.info("explorer.leases.returned", leases=len(left))
        self._write()

    def keep(self, stream: str, leases: Iterable[str]) -> None:
        """Note all leases that are held of a stream now."""
        self._held[stream] = list(leases)
        self._write()

    def _write(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a full disk: then the leases end by their time
                self._file.write_text(json.dumps(self._held))
