"""Memory of a process and all it started, as Linux counts it; elsewhere it is unknown, and no limit holds."""

import contextlib
import os
from pathlib import Path

_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


def resident_mib(pid: int) -> float:
    """Resident memory of a session's processes, in MiB; 0 if unknown. `pid` leads the session."""
    pages = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and _session(entry.name) == pid:
                with contextlib.suppress(OSError, IndexError):
                    pages += int(Path("/proc", entry.name, "statm").read_text().split()[1])
    return pages * _PAGE_MIB


def _session(pid: str) -> int:
    try:
        return os.getsid(int(pid))
    except OSError:
        return -1
