"""Seconds of an explorer's devices by the fate of their attempts, in a file that outlives the process.

While several attempts run, each second is divided among them by their rollouts. After a kill the newest file remains,
with unfinished attempts in `running`.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from trinity.data.experience import Group, Outcome, Task, TaskKind
from trinity.runtime import files

log = structlog.get_logger(__name__)

_WRITE_SECONDS = 1.0


@dataclass
class Attempt:
    """The share of one attempt. `weight`: number of its concurrent rollouts."""

    weight: int
    fate: str = "aborted"
    seconds: float = 0.0
    entered_at: float | None = None  # by the account's clock; None while it does not run


@dataclass
class Account:
    """Seconds of a device by fate: stored, evaluated, failed, dead_letter, cut, aborted. Idle seconds do not count."""

    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    _shared: float = 0.0  # seconds that an attempt of weight 1 would have had, had it run all the time
    _weight: int = 0
    _at: float = 0.0
    _running: list[Attempt] = field(default_factory=list)

    def attempt(self, task: Task) -> Attempt:
        return Attempt(max(1, task.repeat_times))

    def enter(self, attempt: Attempt) -> None:
        """Count the attempt as running."""
        self._advance()
        attempt.entered_at = self._shared
        self._weight += attempt.weight
        self._running.append(attempt)

    def leave(self, attempt: Attempt) -> None:
        """Stop counting: the attempt ended, or waits for a provider."""
        self._advance()
        attempt.seconds += self._since(attempt)
        attempt.entered_at = None
        self._weight -= attempt.weight
        self._running.remove(attempt)

    def end(self, attempt: Attempt) -> None:
        """Charge the attempt's seconds to its fate."""
        self.seconds[attempt.fate] = self.seconds.get(attempt.fate, 0.0) + attempt.seconds

    def running_seconds(self) -> float:
        """Seconds of attempts that have not ended."""
        self._advance()
        return sum(attempt.seconds + self._since(attempt) for attempt in self._running)

    def _since(self, attempt: Attempt) -> float:
        assert attempt.entered_at is not None
        return attempt.weight * (self._shared - attempt.entered_at)

    def _advance(self) -> None:
        now = self.clock()
        if self._weight:
            self._shared += (now - self._at) / self._weight
        self._at = now


def fate_of(task: Task, outcome: Outcome) -> str:
    if not isinstance(outcome, Group):
        return "dead_letter" if outcome.final else "failed"
    return "evaluated" if task.kind is TaskKind.EVALUATION else "stored"


async def keep(account: Account, folder: Path, name: str) -> None:
    """Write <folder>/<name>-<pid>.json every second and when cancelled. A failed write is only logged."""
    path, began = folder / f"{name}-{os.getpid()}.json", time.time()
    about = {"name": name, "pid": os.getpid(), "began": began}
    try:
        while True:
            _write(path, about, account)
            await asyncio.sleep(_WRITE_SECONDS)
    finally:
        _write(path, about, account)


def _write(path: Path, about: dict[str, Any], account: Account) -> None:
    found = {**about, "running": account.running_seconds(), "seconds": account.seconds, "time": time.time()}
    try:
        files.write_atomic(path, json.dumps(found).encode(), durable=False)
    except OSError as error:
        log.warning("explorer.account.unwritten", path=str(path), reason=str(error))
