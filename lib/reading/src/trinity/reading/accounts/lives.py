"""Lives of the processes of a stage and their devices, from the files of its supervisors (device_log.py)."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity.reading.accounts.device_log import folder_of
from trinity.runtime import files

_KILLED = "its `trinity run` ended without a word, as by kill -9 or a power cut"


@dataclass
class Life:
    """One process, in Unix seconds. `how`: died, finished, or ended (with its supervisor, or not yet).

    reason: why it died, as its supervisor saw it.
    """

    pid: int
    began: float
    ended: float
    how: str = "ended"
    reason: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class Watch:
    """The devices of a process and of its successors under one supervisor."""

    name: str
    service: str
    devices: float
    began: float
    ended: float
    lives: list[Life] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Device-seconds: wall-clock seconds times devices."""
        return self.devices * (self.ended - self.began)

    @property
    def leads(self) -> bool:
        """True for the trainer of the first machine. Those of others are named after their machines."""
        return self.name == self.service == "trainer"

    @property
    def kills(self) -> int:
        return sum(life.how == "died" for life in self.lives)


def read(stage: Path) -> list[Watch]:
    """Returns the watches of all supervisors that used this stage folder, by begin. Damaged lines are left out."""
    found: list[Watch] = []
    for path in sorted(folder_of(stage).glob("*.jsonl")):
        found += _watches(path)
    return found


def spent_seconds(job: Path) -> float:
    """Returns the device-seconds of all stages of a job so far. Runs of `trinity replay` lie deeper in its folder."""
    found = (job.glob(f"{stage}monitor/devices/*.jsonl") for stage in ("", "*/"))
    stages = {path.parents[2] for paths in found for path in paths}
    return sum(watch.seconds for stage in stages for watch in read(stage))


def _watches(path: Path) -> list[Watch]:
    found: list[Watch] = []
    opened: dict[str, Watch] = {}
    alive: dict[str, Life] = {}
    for line in filter(_is_event, files.json_lines(path.read_bytes().splitlines())):
        at, event, name = line["time"], line["event"], line.get("name", "")
        if event == "began":
            if name in alive:
                alive[name].how, alive[name].reason = "died", _KILLED
                del alive[name]
            opened[name] = Watch(name, line["service"], line["devices"], at, at)
            found.append(opened[name])
            continue
        if event == "beat":  # of the supervisor: all that it has lives
            for watch in opened.values():
                watch.ended = at
            for life in alive.values():
                life.ended = at
            continue
        if name not in opened:
            continue
        opened[name].ended = at
        if event == "started":
            alive[name] = Life(line["pid"], at, at)
            opened[name].lives.append(alive[name])
        elif name in alive:
            alive[name].ended, alive[name].how = at, event
            alive[name].reason = line.get("reason", "")
            del alive[name]
        if event == "ended":
            del opened[name]
    return found


def _is_event(line: dict[str, Any]) -> bool:
    devices, event = line.get("devices", 0), line.get("event")
    needed = {"began": ("name", "service", "devices"), "started": ("name", "pid")}.get(str(event), ())
    return (
        all(name in line for name in needed)
        and isinstance(line.get("time"), float)
        and math.isfinite(line["time"])
        and all(isinstance(line.get(name, ""), str) for name in ("event", "name", "service", "reason"))
        and isinstance(devices, (int, float))
        and 0 <= devices < math.inf
    )
