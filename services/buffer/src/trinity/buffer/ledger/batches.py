"""Serving step k to the trainer: wait for its ledger entry, then send exactly what it names."""

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

from trinity.buffer.ledger.auxiliary import Auxiliary
from trinity.buffer.ledger.entries import Ledger
from trinity.buffer.ledger.offline import OfflineSource
from trinity.buffer.ledger.wire import BatchEnd, BatchGroup, Entry, Part, Waiting
from trinity.buffer.ledger.writer import LedgerWriter
from trinity.buffer.log.reader import LogReader
from trinity.buffer.state.context import RunContext

_HEARTBEAT_SECONDS = 2.0


class BatchServer:
    """Batches in step order. Asking again gives the same."""

    def __init__(
        self,
        context: RunContext,
        ledger: Ledger,
        reader: LogReader,
        writer: LedgerWriter | None,
        offline: OfflineSource | None,
        auxiliary: Auxiliary,
    ) -> None:
        self._context = context
        self._ledger = ledger
        self._reader = reader
        self._writer = writer
        self._offline = offline
        self._auxiliary = auxiliary
        self._streams = self._sent = 0

    async def parts(self, from_step: int, by_trainer: bool, waits: bool | None = None) -> AsyncIterator[Part]:
        """The parts of every batch from `from_step` to the run's last step. Others than the trainer only look.

        `waits`: as in StreamBatchesRequest.
        """
        if not by_trainer:
            async for part in self._parts(from_step, by_trainer=False):
                yield part
            return
        self._sent = max(self._sent if self._streams else 0, from_step - 1)
        self._streams += 1
        sent_all = False
        try:
            async for part in self._parts(from_step, by_trainer=True, waits=waits):
                yield part
            sent_all = True
        finally:
            self._streams -= 1
            if not sent_all and not self._streams:
                self._sent = 0

    def is_read(self, step: int) -> bool:
        """Returns True if a trainer has this step's batch or is about to get it.

        A disconnected trainer has none. A trainer that reconnects has the batches before its first step.
        """
        return step <= self._sent

    @property
    def waiting_seconds(self) -> float:
        """Seconds for which a connected trainer has waited for a missing batch; 0 if no trainer waits."""
        since = self._context.wanted_since()
        return time.monotonic() - since if since is not None else 0.0

    async def _parts(self, from_step: int, by_trainer: bool, waits: bool | None = None) -> AsyncIterator[Part]:
        step = from_step
        while not self._context.last_step or step <= self._context.last_step:
            ahead = waits is not None and not (waits and step == from_step)
            async with self._context.wanted(step, ahead) if by_trainer else contextlib.nullcontext():
                while not await self._context.changed.wait_for(partial(self._has, step), _HEARTBEAT_SECONDS):
                    yield self.waiting(step)
            async with self._ledger.skipping:
                entry = await self._ledger.get(step)
                if by_trainer:
                    self._sent = max(self._sent, step)
            async for part in self._batch(entry):
                yield part
            if by_trainer:
                self._reader.forget((group.log_sequence for group in entry.groups), below=entry.floor_sequence)
            step += 1

    def _has(self, step: int) -> bool:
        return self._ledger.newest_step >= step

    async def _batch(self, entry: Entry) -> AsyncIterator[Part]:
        yield replace(entry, cursor=b"")  # of no use to the trainer, and long
        if entry.skip_reason:
            yield BatchEnd(entry.step)
            return
        for member in entry.groups if self._offline is None else ():
            outcome, traceparent = await self._reader.payload(member.log_sequence)
            yield BatchGroup(outcome, member.ordinal, traceparent)
        for row in entry.rows:
            assert self._offline is not None
            yield self._offline.part(row)
        for expert in entry.auxiliary:
            yield self._auxiliary.example(expert)
        yield BatchEnd(entry.step)

    def waiting(self, step: int) -> Waiting:
        if self._writer is None:
            return Waiting(step, "the dataset's batch is being written")
        missing, window = self._writer.window.missing(), self._writer.window
        if self._context.live_step < 0:
            reason = "no weights are LIVE yet"
        elif self._context.holds:
            reason = self._context.holds
        else:
            reason = f"{missing} of {self._context.plan.groups_per_step} groups are missing"
            if (fewest := self._context.plan.fewest_groups) < self._context.plan.groups_per_step:
                wait = self._context.plan.config.explorer.over_rollout.wait_after_min
                reason += f", {fewest} are enough after {wait:g} s more"
            if window.dropped:
                reason += f"; {self._writer.about_drops()}"
        scarce = self._context.capacity.is_low
        if scarce:
            reason += "; the log is full, and a newer checkpoint would make room"
        return Waiting(step, reason, missing, checkpoint_wanted=scarce)
