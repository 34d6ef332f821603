"""Which results are there: follows the log of results and wakes the requests that wait for them.

The executor answers each tenant in the order of the log. So every command before an answered one was answered, too.
"""

import asyncio

from trinity.tinker.commands.log import CommandLog, now
from trinity.tinker.gateway.quotas import Quotas
from trinity.tinker.gateway.saves import Saved


class Results:
    """Sequences of the results by request id."""

    def __init__(self, log: CommandLog, kept_seconds: float, quotas: Quotas | None = None) -> None:
        """kept_seconds: how long a result is kept. quotas: of commands without a result; None: there are none."""
        self._log, self._kept_seconds, self._quotas = log, kept_seconds, quotas
        self._sequences: dict[str, int] = {}
        self._failed: set[str] = set()
        self._done: dict[str, int] = {}  # newest position with a result, by tenant
        self._waiting: dict[str, asyncio.Event] = {}
        self.known = asyncio.Event()  # set once all results from before the start are read

    async def follow(self) -> None:
        """Follows for ever."""
        first, last = await self._log.kept_results()
        if last < first:
            self.known.set()
        async for told in self._log.results(max(0, first - 1)):
            self._sequences[told.request_id] = told.sequence
            self._done[told.tenant] = told.position
            if told.failed:
                self._failed.add(told.request_id)
            if self._quotas is not None:
                self._quotas.done(told.tenant, told.position)
            if (event := self._waiting.pop(told.request_id, None)) is not None:
                event.set()
            if told.sequence >= last:
                self.known.set()

    def has_worked(self, saved: Saved) -> bool:
        """Returns True for a save that was executed and is not known to have failed."""
        if saved.request_id in self._failed:
            return False
        gone = self.is_gone(saved.request_id, saved.tenant, saved.position, saved.time)
        return gone or saved.request_id in self._sequences

    def has_failed(self, request_id: str) -> bool:
        return request_id in self._failed

    def is_gone(self, request_id: str, tenant: str, position: int, accepted: float) -> bool:
        """Returns True for a command whose result was there once. accepted: seconds since 1970."""
        if request_id in self._sequences:
            return False
        if tenant in self._done:
            return position <= self._done[tenant]
        return accepted < now() - self._kept_seconds

    async def wait_for(self, request_id: str, seconds: float) -> int | None:
        """Returns the sequence of a result, or None if it is not there after the time."""
        if request_id not in self._sequences:
            event = self._waiting.setdefault(request_id, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                return None
        return self._sequences[request_id]
