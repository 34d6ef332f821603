"""Pauses a run while a disk is full: deaths by it cost no restart, and the run continues once there is room.

nats-server keeps the error of a failed write for ever, so it is started again. Everything else waits: a process that
cannot write dies and is started once there is room; a message that NATS refuses is sent again.
"""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import structlog

from trinity.reading.children import Child

log = structlog.get_logger(__name__)

_open = build_opener(ProxyHandler({})).open  # a proxy of the shell would answer for nats-server

_LOOK_SECONDS, _HEALTH_SECONDS, _ASK_SECONDS, _AGAIN_SECONDS = 0.2, 2.0, 5.0, 0.5
_RECENT_SECONDS = 30.0  # a process may need so long to notice that it could not write
_SAID_AGAIN_SECONDS = 60.0
# Free bytes below which a disk counts as full, and which a run waits for; of a small disk, at most these parts.
_FULL_BYTES, _FULL_PART = 4e6, 0.02
_WANTED_BYTES, _WANTED_PART = 200e6, 0.25
# As the system, SQLite and nats-server say it.
_REASONS = ("no space left on device", "disk quota exceeded", "database or disk is full")
# As Broker.publish says that an account or a server has no room left. After a failed write nats-server answers nothing.
_NATS_REASONS = (*_REASONS, "insufficient storage resources", "insufficient resources", "its disk may be full")
_NATS_REFUSED = "nats did not store a message"  # of Broker.publish
_NATS_AGAIN_SECONDS = 5.0
_STORE_PART = 0.98  # of JetStream's limit, above which it may have no room for a message
_PATH = re.compile(r"['\"](/[^'\"]+)['\"]")


class Disk:
    """One file system of a run."""

    def __init__(self, folder: Path, wanted_bytes: float) -> None:
        self.folder = folder
        total = self._stat()[1]
        self._full = min(_FULL_BYTES, _FULL_PART * total)
        self._least = self.wanted = min(max(_WANTED_BYTES, wanted_bytes), _WANTED_PART * total)

    def _stat(self) -> tuple[float, float]:
        stat = os.statvfs(self.folder)
        free = stat.f_bavail * stat.f_frsize if stat.f_favail or not stat.f_files else 0
        return float(free), float(stat.f_blocks * stat.f_frsize)

    @property
    def free(self) -> float:
        """Free bytes for this user; 0 without a free inode."""
        return self._stat()[0]

    @property
    def is_full(self) -> bool:
        return self.free < self._full

    @property
    def has_room(self) -> bool:
        return self.free >= self.wanted

    def was_too_small(self) -> None:
        """A write failed for want of space: what is free now is not enough, although it may be much."""
        self.wanted = max(self.wanted, self.free + self._least)

    def reset(self) -> None:
        self.wanted = self._least


class DiskWatch:
    """Watches the disks of a stage and, while `run` runs, its nats-server. `hold` is the `hold` of its children."""

    def __init__(
        self, folders: Iterable[Path], wanted_bytes: float, nats: Child | None, say: Callable[[str], None]
    ) -> None:
        """`nats`: the server that this process may start again; None for another's."""
        on = {os.stat(folder).st_dev: folder for folder in folders}
        self._disks = {device: Disk(folder, wanted_bytes) for device, folder in on.items()}
        self._nats, self._say = nats, say
        self._full: Disk | None = None  # the run waits for room on it
        self._full_at = -_RECENT_SECONDS  # monotonic; when a disk was last seen full
        self._said_at = self._store_said_at = -_SAID_AGAIN_SECONDS

    async def run(self) -> None:
        healthy_at = 0.0
        while True:
            self.look()
            if time.monotonic() - healthy_at > _HEALTH_SECONDS:
                await self._mend_nats()
                healthy_at = time.monotonic()
            await asyncio.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        """Notes which disks became full or have room again, and prints each change."""
        full = next((disk for disk in self._disks.values() if disk.is_full), None)
        if full is not None:
            self._full_at = time.monotonic()
            self._begin(full)
        elif self._full is not None and self._full.has_room:
            disk, self._full = self._full, None
            disk.reset()
            self._say(f"disk of {disk.folder} has {_text(disk.free)} free again; the run continues")
            log.info("run.disk.freed", folder=str(disk.folder), free_bytes=int(disk.free))

    def _begin(self, disk: Disk) -> None:
        if self._full is not None and time.monotonic() - self._said_at < _SAID_AGAIN_SECONDS:
            return
        self._full, self._said_at = disk, time.monotonic()
        wanted = f"{_text(disk.free)} free; the run waits for {_text(disk.wanted)}"
        self._say(f"disk of {disk.folder} is full, {wanted}")
        log.error("run.disk.full", folder=str(disk.folder), free_bytes=int(disk.free), wanted_bytes=int(disk.wanted))

    async def hold(self, name: str, reason: str) -> bool:
        """Waits until there is room, if a full disk is why a process died. Returns True if it was."""
        self.look()
        if self._nats is None and _NATS_REFUSED in reason.lower() and any(t in reason.lower() for t in _NATS_REASONS):
            await self._hold_for_nats(name, reason)
            return True
        told = any(text in reason.lower() for text in _REASONS)
        if not told and time.monotonic() - self._full_at > _RECENT_SECONDS:
            return False
        if told and self._full is None:
            disk = self._disk_in(reason)
            disk.was_too_small()
            self._begin(disk)
        log.warning("run.process.held", name=name, reason=reason)
        while self._full is not None:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look()
        await asyncio.sleep(_AGAIN_SECONDS)
        return True

    async def _hold_for_nats(self, name: str, reason: str) -> None:
        """Waits before a process asks another's nats-server again: only the process can tell when that has room."""
        log.warning("run.process.held", name=name, reason=reason)
        if time.monotonic() - self._store_said_at > _SAID_AGAIN_SECONDS:
            self._store_said_at = time.monotonic()
            self._say(
                f"the NATS of TRINITY_NATS_URL has no room, and {name} waits for it: {reason}. Free space on its disk, "
                "or raise its account's limits; restart that nats-server if it keeps the error. Then the run continues"
            )
        await asyncio.sleep(_NATS_AGAIN_SECONDS)

    def _disk_in(self, reason: str) -> Disk:
        """Returns the disk of the path that an error names, by default the fullest."""
        for name in _PATH.findall(reason):
            place = next(folder for folder in Path(name).parents if folder.is_dir())
            on = os.stat(place).st_dev
            self._disks.setdefault(on, Disk(place, 0.0))
            return self._disks[on]
        return min(self._disks.values(), key=lambda disk: disk.free)

    async def _mend_nats(self) -> None:
        """Ends a nats-server that keeps a write error, once there is room; its keeper starts it again."""
        nats = self._nats
        if nats is None or not nats.is_running():
            return
        used, limit = await asyncio.to_thread(_storage, nats.metrics)
        if used > _STORE_PART * limit and time.monotonic() - self._store_said_at > _SAID_AGAIN_SECONDS:
            self._store_said_at = time.monotonic()
            self._say(
                f"NATS refuses messages: JetStream holds {_text(used)} of {_text(limit)}, its part of the disk at the "
                "start; stop the run, free space and start it again"
            )
        error = await asyncio.to_thread(_health_error, nats.metrics)
        if not any(text in error.lower() for text in _REASONS):
            return
        disk = next(iter(self._disks.values()))
        if self._full is None and not disk.has_room:
            self._begin(disk)
        if self._full is None:
            self._say("nats-server keeps an error of the full disk; it is started again")
            log.warning("run.nats.restarted", reason=error)
            self._full_at = time.monotonic()  # its end is one of the full disk
            nats.end_group(signal.SIGTERM)


def _storage(address: str) -> tuple[float, float]:
    """Returns the bytes that JetStream holds in files, and their limit; (0, 1) without an answer."""
    try:
        with _open(f"http://{address}/jsz", timeout=_ASK_SECONDS) as answer:
            told = json.loads(answer.read())
        return float(told["storage"]), float(told["config"]["max_storage"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0, 1.0


def _health_error(address: str) -> str:
    """Returns the error of a nats-server's /healthz; empty for a healthy one, and without an answer."""
    try:
        with _open(f"http://{address}/healthz", timeout=_ASK_SECONDS):
            return ""
    except HTTPError as error:
        try:
            return str(json.loads(error.read()).get("error", ""))
        except (ValueError, AttributeError):
            return ""
    except OSError:
        return ""


def _text(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"
