"""Which results are there: follows the log of results and wakes the requests that wait for them."""

import asyncio

from trinity.data.tenants.log import CommandLog
from trinity.tinker.quotas import Quotas


class Results:
    """Sequences of the results by request id."""

    def __init__(self, log: CommandLog, quotas: Quotas | None = None) -> None:
        """quotas: of commands without a result; None: there are none."""
        self._log, self._quotas = log, quotas
        self._sequences: dict[str, int] = {}
        self._waiting: dict[str, asyncio.Event] = {}

    async def follow(self) -> None:
        """Follows for ever."""
        async for told in self._log.results(max(0, await self._log.first_result() - 1)):
            self._sequences[told.request_id] = told.sequence
            if self._quotas is not None:
                self._quotas.done(told.tenant, told.position)
            if (event := self._waiting.pop(told.request_id, None)) is not None:
                event.set()

    def has(self, request_id: str) -> bool:
        """Returns True for a result that is kept."""
        return request_id in self._sequences

    async def wait_for(self, request_id: str, seconds: float) -> int | None:
        """Returns the sequence of a result, or None if it is not there after the time."""
        if request_id not in self._sequences:
            event = self._waiting.setdefault(request_id, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                return None
        return self._sequences[request_id]
