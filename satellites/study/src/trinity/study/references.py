"""The answer that a taskset has for the task of an experience."""

from pathlib import Path
from typing import Any

from trinity.config import Config
from trinity.config.errors import ConfigError
from trinity.data.datasets import read_taskset
from trinity.data.tables import column_value
from trinity.reading.errors import RunError
from trinity.runtime.errors import TrinityError

UNREADABLE = (RunError, TrinityError, ConfigError, OSError, ValueError, LookupError, TypeError, OverflowError)

_MOST_BYTES = 256 << 20  # of a taskset that is read for its answers


class References:
    """Reads each taskset once. `beside`: the folder of a stage; a recorded run has its tasksets next to it."""

    def __init__(self, config: Config, beside: Path | None) -> None:
        self._config, self._beside = config, beside
        self._tasksets: dict[str, tuple[str, Any] | None] = {}

    def of(self, row: dict[str, Any]) -> str | None:
        """Returns the answer; None if the taskset has none, or cannot be read here."""
        name, *numbers = str(row.get("task_id", "")).rsplit("/", 3)
        if len(numbers) != 3 or not numbers[2].isdecimal():
            return None
        if name not in self._tasksets:
            self._tasksets[name] = self._read(name)
        found, number = self._tasksets[name], int(numbers[2])
        if found is None or number >= len(found[1]):
            return None
        known, value = column_value(found[1][number], found[0])
        return str(value) if known and value not in (None, "") else None

    def _read(self, name: str) -> tuple[str, Any] | None:
        """Returns the column of answers and the rows of a taskset on this machine."""
        for _, taskset in self._config.buffer.explorer_input.by_key():
            path = Path(taskset.path or "").expanduser()
            if not path.exists() and self._beside is not None:
                path = self._beside.parent / path
            if taskset.name != name or not taskset.path or not path.exists():
                continue
            try:
                found = path.rglob("*") if path.is_dir() else [path]
                if sum(one.stat().st_size for one in found) <= _MOST_BYTES:
                    return taskset.format.response_key, read_taskset(taskset.model_copy(update={"path": str(path)}))
            except UNREADABLE:
                return None
        return None
