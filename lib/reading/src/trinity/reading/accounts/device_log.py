"""Events of the processes that have devices, as their supervisor saw them, one line each.

    {"time": 1795456194.3, "event": "began", "name": "explorer", "service": "explorer", "devices": 1}
    {"time": 1795456194.4, "event": "started", "name": "explorer", "pid": 4711}

Devices count from `began` to `ended`. `died` and `finished`: the process is gone. A `beat`, without a name, proves that
the supervisor lives: after a power cut its devices count up to the last beat.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger(__name__)

BEAT_SECONDS = 5.0


def folder_of(stage: Path) -> Path:
    """Folder of the accounts of a stage: <supervisor>.jsonl and <explorer>-<pid>.json."""
    return stage / "monitor" / "devices"


class DeviceLog:
    """Writes the events of one supervisor's processes. A full disk ends nothing."""

    def __init__(self, stage: Path, supervisor: str = "main") -> None:
        self._path = folder_of(stage) / f"{supervisor}.jsonl"
        self._names: list[str] = []

    def begin(self, name: str, service: str, devices: float) -> None:
        """Counts these devices from now on."""
        self._names.append(name)
        self._write({"event": "began", "name": name, "service": service, "devices": devices})

    def note(self, event: str, name: str, pid: int, reason: str = "") -> None:
        """Notes that a begun process has started, died for a reason or finished. Ignores processes without devices."""
        if name in self._names:
            self._write({"event": event, "name": name, "pid": pid} | ({"reason": reason} if reason else {}))

    def end(self) -> None:
        """Stops counting the devices."""
        for name in self._names:
            self._write({"event": "ended", "name": name})
        self._names.clear()

    async def beat(self) -> None:
        """Writes beats until it is cancelled."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._write({"event": "beat"})

    def _write(self, fields: dict[str, Any]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as lines:
                lines.write(json.dumps({"time": time.time(), **fields}) + "\n")
        except OSError as error:
            log.warning("run.devices.not_written", path=str(self._path), reason=str(error))
