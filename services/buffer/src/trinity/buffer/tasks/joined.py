"""Tasksets that joining explorers bring: whose turn it is, and how far each was fed.

How far each was fed travels with the newest task of the queue, as the counts of the run's own tasksets do.
"""

import asyncio
import json
import re
from collections import deque
from dataclasses import dataclass, field

from trinity.config import Plan
from trinity.data.experience import Task

_MOST = 64
_LONGEST_NAME = 128
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{_LONGEST_NAME}}}")
_LONGEST_HEADER = 32_768


def why_not_joined(plan: Plan) -> str:
    """The reason why explorers cannot bring tasks to a run; empty if they can."""
    if plan.config.explorer.traffic is not None:
        return "the run learns from live traffic: all its tasks are rewarded calls"
    if plan.config.reproducible:
        return "the run is reproducible, and tasks that come at any time make its batches depend on the time"
    if plan.staleness.bound == 0:
        return (
            "the run is synchronous (synchronizer.sync_interval 1, sync_offset 0): all tasks of a batch are fed when "
            "the weights before it are ready, and none is left to mix; set synchronizer.sync_offset in the run's YAML"
        )
    return ""


@dataclass(frozen=True)
class Waiting:
    """A task that a caller waits to have fed; `stored` is False if it was fed before."""

    task: Task
    stored: "asyncio.Future[bool]"


@dataclass
class _Joined:
    """weight: rows times weight. credit: tasks that are due to it."""

    weight: float
    credit: float = 0.0
    waiting: deque[Waiting] = field(default_factory=deque)


class JoinedTasksets:
    """own_weight: of the run's tasksets. most_credit: tasks that a taskset may catch up with at once."""

    def __init__(self, own_weight: float, most_credit: int) -> None:
        self._own_weight, self._most_credit = own_weight, most_credit
        self._tasksets: dict[str, _Joined] = {}
        self._positions: dict[str, int] = {}

    def problem(self, name: str) -> str:
        """Why a taskset of this name cannot join; empty if it can."""
        if not _NAME.fullmatch(name):
            return f"must be 1 to {_LONGEST_NAME} letters, digits, '_', '-' and '.'"
        if name not in self._positions and len(self._positions) >= _MOST:
            return f"is one more than the {_MOST} tasksets that may join a run"
        return ""

    @property
    def names(self) -> list[str]:
        return list(self._positions)

    def position(self, name: str) -> int:
        """Tasks of a taskset that were fed, or are waiting."""
        joined = self._tasksets.get(name)
        waiting = 0 if joined is None else sum(not one.stored.cancelled() for one in joined.waiting)
        return self._positions.get(name, 0) + waiting

    def fed(self, name: str) -> int:
        """Tasks of a taskset that were fed."""
        return self._positions.get(name, 0)

    def add(self, name: str, weight: float, tasks: list[Task]) -> "list[asyncio.Future[bool]]":
        """Let tasks wait for their turn. They follow the taskset's `position`."""
        joined = self._tasksets.setdefault(name, _Joined(weight))
        joined.weight = weight
        self._positions.setdefault(name, 0)
        loop = asyncio.get_running_loop()
        joined.waiting = deque(one for one in joined.waiting if not one.stored.cancelled())
        added = [Waiting(task, loop.create_future()) for task in tasks]
        joined.waiting.extend(added)
        return [one.stored for one in added]

    def take(self) -> tuple[str, Waiting] | None:
        """The joined task whose turn is next, with its taskset; None: it is the run's own turn.

        Every call is one turn. A taskset is due a part of the turns while tasks of it wait, and takes its turn when it
        is due one half of a task at least.
        """
        active = {name: joined for name, joined in self._tasksets.items() if self._waits(joined)}
        total = self._own_weight + sum(joined.weight for joined in active.values())
        for joined in active.values():
            joined.credit = min(self._most_credit, joined.credit + joined.weight / total)
        name = max(active, key=lambda one: active[one].credit, default="")
        if not name or active[name].credit < 0.5:
            return None
        active[name].credit -= 1.0
        return name, active[name].waiting.popleft()

    @staticmethod
    def _waits(joined: _Joined) -> bool:
        while joined.waiting and joined.waiting[0].stored.cancelled():
            joined.waiting.popleft()
        return bool(joined.waiting)

    def advanced(self, name: str) -> dict[str, int]:
        """The positions once one more task of a taskset is fed; an empty name: as they are."""
        return {**self._positions, name: self.fed(name) + 1} if name else dict(self._positions)

    def keep(self, positions: dict[str, int]) -> None:
        """These positions are stored."""
        self._positions = positions

    @staticmethod
    def to_header(positions: dict[str, int]) -> str:
        return json.dumps(positions, separators=(",", ":"))

    @staticmethod
    def from_header(text: str) -> dict[str, int]:
        """The positions in a header; none for what no buffer wrote."""
        try:
            found = json.loads(text) if 0 < len(text) <= _LONGEST_HEADER else {}
        except (ValueError, RecursionError):
            return {}
        is_ours = isinstance(found, dict) and all(type(count) is int and count >= 0 for count in found.values())
        return found if is_ours and len(found) <= _MOST else {}
