"""A read-only buffer, by which commands look at a run or train its steps again, during the run or after it.

It creates nothing on the broker or in the job folder. Its ledger is the one of its start.
"""

import asyncio
from collections.abc import Callable
from functools import cached_property
from typing import Any

from trinity.buffer.ledger.auxiliary import Auxiliary
from trinity.buffer.ledger.batches import BatchServer
from trinity.buffer.ledger.entries import Ledger
from trinity.buffer.ledger.offline import OfflineSource
from trinity.buffer.ledger.wire import window_at
from trinity.buffer.log.dead_letters import DeadLetters
from trinity.buffer.log.reader import LogReader
from trinity.buffer.run import Run
from trinity.buffer.settings import BufferSettings
from trinity.buffer.state.context import RunContext
from trinity.buffer.tasks.feeder import newest_fed
from trinity.buffer.window.policy import Policy
from trinity.buffer.window.window import Window
from trinity.runtime import headers
from trinity.runtime.broker import StreamSpec, check_stream
from trinity.runtime.errors import DataLoss, NotFound


class _WhenAsked:
    """Stands for what reads a dataset: ledger and dead letters can be looked at when the data is gone."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Any:
        return self._make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


class ReadOnlyRun(Run):
    """The streams of a run: ledger, log, dead letters. Feeds, releases and evaluates nothing."""

    def __init__(self, context: RunContext, settings: BufferSettings) -> None:
        plan = context.plan
        self.context = context
        self.ledger = Ledger(context)
        self.reader = LogReader(context, settings.cache_mib * 2**20)
        self.writer = self.feeder = self.fences = self.evaluator = self.retention = None
        offline: Any = _WhenAsked(lambda: OfflineSource(context, self.ledger, plan.experience_buffer))
        auxiliary: Any = _WhenAsked(lambda: Auxiliary(plan))
        self.offline = offline if plan.offline else None
        self.letters = DeadLetters(context, lambda _: False, lambda: 0)
        self.batches = BatchServer(context, self.ledger, self.reader, None, self.offline, auxiliary)

    async def open(self) -> None:
        """NotFound if this NATS has no such run; Conflict if a version with other subjects wrote it."""
        names = self.context.names
        try:
            await check_stream(self.context.broker, StreamSpec(names.experiences_stream, names.log_subjects))
            await self.ledger.open()
        except NotFound:
            raise NotFound(f"this NATS knows no run {self.context.run!r}") from None
        self.context.last_step = self.ledger.newest_step

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def rewind(self, step: int) -> None:
        """Rewinds as Run does; the DataLoss also names the lowest step from which the run can be trained again."""
        try:
            await super().rewind(step)
        except DataLoss:
            if step > self.ledger.newest_step:
                raise
            lowest, newest = await self._lowest_step(step + 1), self.ledger.newest_step
            hint = f"the lowest step that can be is {lowest}" if lowest <= newest else "none can be"
            raise DataLoss(
                f"step: experience of step {step + 1} or later was released, it cannot be trained again; {hint}"
            ) from None

    async def _lowest_step(self, step: int) -> int:
        """The lowest step from this one on whose experience is there, and that of all later ones."""
        first = (await self.context.broker.state(self.context.names.experiences_stream)).first_sequence
        lowest = step
        for later in range(step, self.ledger.newest_step + 1):
            entry = await self.ledger.get(later)
            if any(group.log_sequence < first for group in entry.groups):
                lowest = later + 1
            if entry.floor_sequence >= first:
                break
        return lowest

    async def counts(self) -> tuple[Window, int]:
        """The window at the newest ledger entry, and the tasks fed up to now, requeued ones included."""
        window = window_at(await self.ledger.cursor(), Policy(self.context.plan.groups_per_step))
        newest = await newest_fed(self.context)
        return window, len(window.requeued) if newest is None else int(newest.headers[headers.FED])
