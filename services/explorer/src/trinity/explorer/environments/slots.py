"""Slots for episodes. An environment plays a limited number at a time; callers wait here for a free slot.

The next free slot goes to the episode of the oldest attempt. So attempts finish one after the other, and a younger
attempt cannot starve a half-finished older attempt. An episode needs one slot and releases it at its
end, so a group larger than the number of slots is played in portions.

The time limit of an attempt begins with its first slot. The wait before it is bounded by the limits of all earlier
attempts.
"""

import asyncio
import contextlib
import heapq
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count

from trinity.runtime.metrics import Gauge

WAITING = Gauge(
    "trinity_explorer_episodes_waiting", "Episodes that wait for a slot at an environment's providers", ["environment"]
)

_numbers = count()


@dataclass
class Attempt:
    """An attempt that needs slots. `timeout`: its limit of `seconds`; None for no limit."""

    timeout: asyncio.Timeout | None = None
    seconds: float = 0.0
    number: int = field(default_factory=lambda: next(_numbers))
    started: bool = False
    began: float = field(default_factory=time.monotonic)  # of the limit

    def seconds_taken(self) -> float:
        """Seconds of the limit that have passed."""
        return time.monotonic() - self.began

    def suspend_limit(self) -> None:
        """Suspend the limit before the wait for the first slot."""
        if self.timeout is not None and not self.started:
            self.timeout.reschedule(None)

    def resume_limit(self, waited: bool) -> None:
        """Restart the limit once the slot is acquired or the wait cancelled, if this or another episode's wait had
        suspended it."""
        if self.timeout is not None and not self.started and (waited or self.timeout.when() is None):
            self.timeout.reschedule(asyncio.get_running_loop().time() + self.seconds)
            self.began = time.monotonic()
        self.started = True


_current: ContextVar[Attempt | None] = ContextVar("attempt", default=None)


@contextlib.contextmanager
def attempt(timeout: asyncio.Timeout, seconds: float) -> Iterator[Attempt]:
    """Make episodes of the body, and of asyncio tasks that it starts, belong to one attempt with this limit."""
    one = Attempt(timeout, seconds)
    token = _current.set(one)
    try:
        yield one
    finally:
        _current.reset(token)


@contextlib.contextmanager
def limit_suspended() -> Iterator[Attempt]:
    """Suspend the attempt's time limit in the body, unless the attempt already plays."""
    owner = _current.get() or Attempt()
    owner.suspend_limit()
    try:
        yield owner
    finally:
        owner.resume_limit(True)


class EpisodeSlots:
    """The slots of one environment, summed over its providers."""

    def __init__(self, environment: str) -> None:
        self.in_use = 0
        self._limit = 0
        self._environment = environment
        self._tickets = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def acquire(self, limit: int) -> bool:
        """Wait for a slot, which the caller releases. Returns True if it had to wait. `limit`: number of slots; 0 for
        none."""
        self._limit = limit
        owner = _current.get() or Attempt()
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (owner.number, next(self._tickets), slot))
        self._assign_free()
        waits = not slot.done()
        try:
            if waits:
                owner.suspend_limit()
                await self._wait(slot)
        finally:
            owner.resume_limit(waits)
        return waits

    def release(self) -> None:
        self.in_use -= 1
        self._assign_free()

    async def _wait(self, slot: "asyncio.Future[None]") -> None:
        with WAITING.labels(self._environment).track_inprogress():
            try:
                await slot
            except asyncio.CancelledError:
                if not slot.cancelled():  # cancelled after the slot was assigned
                    self.release()
                raise

    def _assign_free(self) -> None:
        while self._waiting and (not self._limit or self.in_use < self._limit):
            *_, slot = heapq.heappop(self._waiting)
            if not slot.done():  # a cancelled episode needs no slot
                self.in_use += 1
                slot.set_result(None)
