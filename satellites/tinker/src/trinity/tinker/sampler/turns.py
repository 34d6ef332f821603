"""Which waiting request an engine begins first: start-time fair queuing of tenants, by vLLM's priorities.

Goyal, Vin and Cheng, "Start-time Fair Queueing" (SIGCOMM 1996), in tokens: the next request is the one with the least
start tag S = max(v, F of its tenant's request before). v is the least S of the requests that wait or run. F is S
plus the most tokens that the request may take; when the request ends, F loses the tokens that it did not take.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Turn:
    """A request's place. `priority`: vLLM begins the least first. `took`: set before the end, tokens."""

    priority: int
    took: int


class Turns:
    """The requests that wait or run in one engine."""

    def __init__(self) -> None:
        self._begun: list[int] = []  # S of each
        self._tags: dict[str, int] = {}  # F by tenant

    @contextlib.contextmanager
    def of(self, tenant: str, most: int) -> Iterator[Turn]:
        """The place of the request that the context is. `most`: tokens that it may take."""
        if not self._begun:
            self._tags.clear()
        begin = max(min(self._begun, default=0), self._tags.get(tenant, 0))
        self._tags[tenant] = begin + most
        self._begun.append(begin)
        turn = Turn(begin, most)
        try:
            yield turn
        finally:
            self._begun.remove(begin)
            self._tags[tenant] -= most - turn.took
