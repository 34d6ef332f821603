"""Places for episodes: an environment plays so many at a time, and who comes beyond that waits here, not at its door.

The next place goes to the oldest attempt's episode: attempts end one after the other, and none is left with half of its
episodes while younger ones take the places. An episode needs one place and gives it back at its own end, whatever its
siblings wait for; so a group larger than all places is played in portions.

While an attempt waits for its first place its time does not run. That wait has an end, because the time of all before
it does run.
"""

import asyncio
import contextlib
import heapq
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count

from trinity.runtime.metrics import Gauge

WAITING = Gauge(
    "trinity_explorer_episodes_waiting", "Episodes that wait for a place at an environment's providers", ["environment"]
)

_numbers = count()


@dataclass
class Attempt:
    """Who asks for places. `timeout`: the running limit of the attempt, of `seconds`; None: it has none."""

    timeout: asyncio.Timeout | None = None
    seconds: float = 0.0
    number: int = field(default_factory=lambda: next(_numbers))
    placed: bool = False

    def waits(self) -> None:
        if self.timeout is not None and not self.placed:
            self.timeout.reschedule(None)

    def goes_on(self, after_waiting: bool) -> None:
        """With a place, or because somebody gave up waiting for one."""
        if self.timeout is not None and not self.placed and after_waiting:
            self.timeout.reschedule(asyncio.get_running_loop().time() + self.seconds)
        self.placed = True


_current: ContextVar[Attempt | None] = ContextVar("attempt", default=None)


@contextlib.contextmanager
def attempt(timeout: asyncio.Timeout, seconds: float) -> Iterator[None]:
    """The episodes begun in the body, also by tasks that it starts, are of one attempt with this limit."""
    token = _current.set(Attempt(timeout, seconds))
    try:
        yield
    finally:
        _current.reset(token)


class Places:
    """Those of one environment, at all its providers together."""

    def __init__(self, environment: str) -> None:
        self.taken = 0
        self._limit = 0
        self._environment = environment
        self._tickets = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def take(self, limit: int) -> bool:
        """Returns with a place, which must be given back; whether it had to be waited for. `limit`: how many there are
        by now; 0: as many as one likes."""
        self._limit = limit
        who = _current.get() or Attempt()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (who.number, next(self._tickets), place))
        self._hand_out()
        waits = not place.done()
        try:
            if waits:
                who.waits()
                await self._wait(place)
        finally:
            who.goes_on(waits)
        return waits

    def give_back(self) -> None:
        self.taken -= 1
        self._hand_out()

    async def _wait(self, place: "asyncio.Future[None]") -> None:
        with WAITING.labels(self._environment).track_inprogress():
            try:
                await place
            except asyncio.CancelledError:
                if not place.cancelled():  # cancelled with the place in its hand
                    self.give_back()
                raise

    def _hand_out(self) -> None:
        while self._waiting and (not self._limit or self.taken < self._limit):
            *_, place = heapq.heappop(self._waiting)
            if not place.done():  # else its episode was cancelled
                self.taken += 1
                place.set_result(None)
