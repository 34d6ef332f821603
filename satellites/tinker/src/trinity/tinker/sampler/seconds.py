"""Divides the time in which an engine works among the requests that are under way, by their sequences.

The parts add up to the time in which at least one is. An instant is divided as by generalized processor sharing
(Parekh and Gallager, 1993): virtual time v grows by dt / (sequences under way), and a request of n sequences gets
n * (v at its end - v at its begin).
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from trinity.runtime.metrics import Counter
from trinity.tinker.commands.account import SAMPLE, Account

SECONDS = Counter(
    "trinity_sampler_seconds", "Seconds of the engine; those of requests at once by their sequences", ["tenant"]
)


class Seconds:
    """Adds the seconds of requests to an account."""

    def __init__(self, account: Account, clock: Callable[[], float] = time.monotonic) -> None:
        self._account, self._clock = account, clock
        self._sequences = 0
        self._virtual, self._at = 0.0, 0.0

    @contextlib.contextmanager
    def of(self, tenant: str, sequences: int) -> Iterator[None]:
        """Counts the request that the context is, also if it fails."""
        self._move(sequences)
        begin = self._virtual
        try:
            yield
        finally:
            self._move(-sequences)
            seconds = sequences * (self._virtual - begin)
            self._account.add(tenant, SAMPLE, seconds)
            SECONDS.labels(tenant).inc(seconds)

    def _move(self, more: int) -> None:
        """Counts the time up to now, and so many more sequences from now on."""
        now = self._clock()
        if self._sequences:
            self._virtual += (now - self._at) / self._sequences
        self._at, self._sequences = now, self._sequences + more
