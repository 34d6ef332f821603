"""Memory of worker processes and their children, as Linux counts it. Elsewhere it is unknown, and no limit holds."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

_LOOKS_SECONDS = 0.1
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


def resident_mib(leaders: Collection[int]) -> dict[int, float]:
    """Returns the resident memory of the sessions that these processes lead, in MiB; 0 if unknown."""
    pages = dict.fromkeys(leaders, 0)
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and (leader := _session(entry.name)) in pages:
                with contextlib.suppress(OSError, IndexError):
                    pages[leader] += int(Path("/proc", entry.name, "statm").read_text().split()[1])
    return {leader: count * _PAGE_MIB for leader, count in pages.items()}


def _session(pid: str) -> int:
    try:
        return os.getsid(int(pid))
    except OSError:
        return -1


@dataclass(frozen=True)
class _Watched:
    limit_mib: int
    busy: Callable[[], bool]
    over: Callable[[], None]


class MemoryWatch:
    """Polls all watched processes at once, in a thread, while any of them is busy. One for each event loop."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._polling: asyncio.Task[None] | None = None

    def add(self, pid: int, limit_mib: int, busy: Callable[[], bool], over: Callable[[], None]) -> None:
        """Watches a session. `over` is called when it uses more, and must remove it."""
        self._watched[pid] = _Watched(limit_mib, busy, over)
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())

    def remove(self, pid: int) -> None:
        """Stops watching. Idempotent."""
        self._watched.pop(pid, None)

    async def _poll(self) -> None:
        while self._watched:
            await asyncio.sleep(_LOOKS_SECONDS)
            if not any(watched.busy() for watched in self._watched.values()):
                continue
            for pid, used in (await asyncio.to_thread(resident_mib, tuple(self._watched))).items():
                watched = self._watched.get(pid)
                if watched is not None and used > watched.limit_mib:
                    watched.over()


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, MemoryWatch] = WeakKeyDictionary()


def memory_watch() -> MemoryWatch:
    """Returns the watch of the running event loop."""
    return _watches.setdefault(asyncio.get_running_loop(), MemoryWatch())
