"""A line of a log: its fields, and the selection of lines."""

import contextlib
import json
import re
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from trinity.reading.errors import RunError

NATS = "nats"
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_RANKS = {**_LEVELS, "warn": 30, "exception": 40, "critical": 50, "fatal": 50}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_NATS_TIME = re.compile(r"\[\d+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6}) ")  # of this machine


@dataclass(frozen=True)
class Entry:
    """One line of one process. `time`: seconds since 1970, None without a time. `fields`: empty for text.

    `service`: of the process, if it differs from its name.
    """

    process: str
    text: str
    time: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    service: str = ""

    @property
    def rank(self) -> int:
        """Rank of the level. Text has no level and always passes the filter."""
        return _RANKS.get(str(self.fields.get("level", "info")).lower(), _LEVELS["info"]) if self.fields else 100

    def order(self) -> float:
        """Sort key: the time."""
        return self.time or 0.0


@dataclass(frozen=True)
class Wanted:
    """Selects lines by service or process, rank, and time.

    `since`: seconds since 1970.
    """

    least: int = 0
    service: str = ""
    since: float = 0.0

    @classmethod
    def of(cls, level: str, service: str, age: str) -> "Wanted":
        """Builds the selection from a level's name and an age such as 10m.

        Raises RunError for an unknown level or age.
        """
        if level.lower() not in _LEVELS:
            raise RunError(f"level {level!r} is none of {', '.join(_LEVELS)}", code=2)
        found = _AGE.fullmatch(age)
        if age and found is None:
            raise RunError(f"--since {age}: must be a number with s, m, h or d, as 10m", code=2)
        since = time.time() - float(found[1]) * _SECONDS[found[2]] if found else 0.0
        return cls(_LEVELS[level.lower()], service, since)

    def has(self, entry: Entry) -> bool:
        """Returns True for a selected line."""
        named = self.service in ("", entry.process, entry.service)
        return named and entry.rank >= self.least and entry.order() >= self.since


def parse(line: bytes, process: str) -> Entry:
    """Parses a line of a log file."""
    text = line.decode(errors="replace")
    if process == NATS:
        return Entry(process, text, _nats_time(text))
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return Entry(process, text)
    try:
        moment = datetime.fromisoformat(fields["time"])
    except (KeyError, TypeError, ValueError):
        return Entry(process, text, None, fields)
    return Entry(process, text, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp(), fields)


def _nats_time(text: str) -> float | None:
    found = _NATS_TIME.match(text)
    with contextlib.suppress(ValueError, OverflowError):
        return datetime.strptime(found[1], "%Y/%m/%d %H:%M:%S.%f").timestamp() if found else None
    return None
