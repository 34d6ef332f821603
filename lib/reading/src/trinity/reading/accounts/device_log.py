"""When the processes that have devices lived, as their supervisor saw it: a line for each event.

    {"time": 1795456194.3, "event": "began", "name": "explorer", "service": "explorer", "devices": 1}
    {"time": 1795456194.4, "event": "started", "name": "explorer", "pid": 4711}

`began` and `ended`: from when to when the devices are counted. `died`, `finished`: the process is there no longer. A
`beat`, without a name, says that the supervisor lives: after a power cut its devices are counted up to the last one.
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
    """Where the accounts of a stage are: <supervisor>.jsonl of each, and <explorer>-<pid>.json of its explorers."""
    return stage / "monitor" / "devices"


class DeviceLog:
    """The events of one supervisor's processes. A disk that is full ends nothing."""

    def __init__(self, stage: Path, supervisor: str = "main") -> None:
        self._path = folder_of(stage) / f"{supervisor}.jsonl"
        self._names: list[str] = []

    def begin(self, name: str, service: str, devices: float) -> None:
        """Count these devices from now on."""
        self._names.append(name)
        self._write({"event": "began", "name": name, "service": service, "devices": devices})

    def note(self, event: str, name: str, pid: int) -> None:
        """A process that was begun has started, died or finished; others have no devices."""
        if name in self._names:
            self._write({"event": event, "name": name, "pid": pid})

    def end(self) -> None:
        """Count the devices no longer."""
        for name in self._names:
            self._write({"event": "ended", "name": name})
        self._names.clear()

    async def beat(self) -> None:
        """Until cancelled."""
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
