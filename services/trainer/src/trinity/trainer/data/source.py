"""Decides the training loop's next action: to train the next batch, or an action before it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trinity.runtime.errors import DataLoss
from trinity.trainer.data.client import BufferClient, RawBatch, decode_batch, encode_batch
from trinity.trainer.process.control import Control
from trinity.trainer.process.exchange import Exchange
from trinity.trainer.process.times import StepTimes

# Ranks that wait for a batch exchange this often, since torch ends a collective after its timeout.
_NEWS_SECONDS = 20.0


@dataclass(frozen=True)
class Train:
    """The next step's batch."""

    batch: RawBatch


@dataclass(frozen=True)
class Skip:
    """An operator passes the next step: its entry has a reason, and its batch no groups."""

    batch: RawBatch


@dataclass(frozen=True)
class Save:
    """A checkpoint is requested before the batch has arrived."""


@dataclass(frozen=True)
class RollBack:
    """An operator made an older version LIVE again."""


@dataclass(frozen=True)
class Stop:
    """The process ends before the last step."""


@dataclass(frozen=True)
class Finish:
    """The last step is done."""


Command = Train | Skip | Save | RollBack | Stop | Finish
_WITHOUT_BATCH: dict[bytes, Command] = {b"save": Save(), b"roll back": RollBack(), b"stop": Stop()}


@dataclass
class BatchSource:
    """open -> next. Both are collectives. buffer: None on ranks but the first.

    rollback_is_due(step): returns True on rank 0 if a rollback follows this step; it may raise errors that end the
    trainer. last_step: replaces the run's last step.
    """

    exchange: Exchange
    control: Control
    buffer: BufferClient | None
    times: StepTimes
    rollback_is_due: Callable[[int], bool]
    last_step: int | None = None
    _reads: bool = field(default=False, init=False)

    def open(self, step: int) -> None:
        """Continues after this step. Raises BatchLost if the buffer cannot serve the next one."""
        last_step = self.buffer.rewind(step).last_step if self.buffer is not None else 0
        self.control.update(step=step, last_step=self.last_step or self.exchange.share(int(last_step)))

    def next(self, step: int) -> Command:
        """Blocks until the action after this step is known; returns it."""
        if step >= self.control.progress.last_step:
            return RollBack() if self.exchange.share(self.rollback_is_due(step)) else Finish()
        if self.buffer is not None and not self._reads:
            self.buffer.start(step + 1)
            self._reads = True
        begin, began = time.monotonic(), time.time()
        command = self.exchange.share_when_known(lambda: self._poll(step), _encode, _decode)
        self.times.waited(began, began + time.monotonic() - begin)
        return command

    def _poll(self, step: int) -> Command | None:
        """Returns on rank 0 the next action, or None after _NEWS_SECONDS. A pause delays only the next batch."""
        assert self.buffer is not None
        end = time.monotonic() + _NEWS_SECONDS
        unsaved = self.control.progress.saved_step < step
        while not self.control.stopping:
            if time.monotonic() > end:
                return None
            if self.rollback_is_due(step):
                return RollBack()
            if unsaved and (self.buffer.checkpoint_wanted or self.control.take_checkpoint_request()):
                return Save()
            if self.control.paused:
                self.control.update(state="paused")
                time.sleep(0.05)
                continue
            waiting_for = self.buffer.waiting_for or f"the batch of step {step + 1}"
            self.control.update(state="waiting", waiting_for=waiting_for)
            batch = self.buffer.next(timeout_seconds=0.2)
            if batch is not None:
                if batch.entry.step != step + 1:
                    raise DataLoss(f"the buffer sent step {batch.entry.step}, step {step + 1} was requested")
                self.control.update(state="training", waiting_for="")
                return _command(batch)
        return Save() if unsaved and self.control.saves_before_stop else Stop()


def _command(batch: RawBatch) -> Command:
    return Skip(batch) if batch.entry.skip_reason else Train(batch)


def _encode(command: Command) -> bytes:
    if isinstance(command, Train | Skip):
        return encode_batch(command.batch)
    return next(name for name, other in _WITHOUT_BATCH.items() if other == command)


def _decode(data: bytes) -> Command:
    return _WITHOUT_BATCH.get(data) or _command(decode_batch(data))
