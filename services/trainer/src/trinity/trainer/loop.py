"""The training loop: ask for step k, train, publish, save. Every rank runs it; rank 0 talks to the other services.

    resume -> (next -> train -> publish -> save) for every step -> finished

After a crash it resumes from the newest whole checkpoint, and the ledger answers with the same batches as before.
Versions that went out before the crash stay as they are: weights of a step are published once.

A rollback is applied between steps: it loads the older version's weights, keeps the step count, and saves a checkpoint
at once. If a crash took the trainer back behind that version, the rollback waits until its step is reached again.

A replay is the same loop with other parts (trinity.trainer.replay).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from trinity.trainer.data.bad_steps import BadStep
from trinity.trainer.data.batch import TrainBatch
from trinity.trainer.data.client import RawBatch
from trinity.trainer.data.source import Command, Finish, RollBack, Save, Skip, Stop, Train
from trinity.trainer.engine.step import StepDone, skipped
from trinity.trainer.process.control import Control

log = structlog.get_logger(__name__)


class Batches(Protocol):
    """What to do next. All methods of these parts are collectives: every rank calls them."""

    def open(self, step: int) -> None: ...
    def next(self, step: int) -> Command: ...


class Trainer(Protocol):
    """Trains a step's batch. Raises BadStep if that ends the run."""

    def train(self, raw: RawBatch) -> StepDone: ...


class Versions(Protocol):
    """Weight versions. `publish` does nothing for a step whose version is not due, or went out before a crash.

    A version goes out a little later; `finish` and `close` wait for that.
    """

    def open(self, step: int, rollback: int) -> None: ...
    def observe(self, batch: TrainBatch) -> None: ...
    def publish(self, step: int) -> None: ...
    def rollback_is_due(self, step: int) -> bool: ...
    def roll_back(self) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


class CheckpointWriter(Protocol):
    """`resume` returns the step of the checkpoint it has loaded, or 0, and the newest rollback applied to it.

    A saved step is a checkpoint a little later; `settle` waits for that.
    """

    def resume(self) -> tuple[int, int]: ...
    def save(self, step: int) -> None: ...
    def save_if_due(self, step: int) -> None: ...
    def settle(self) -> None: ...


class Observer(Protocol):
    """begin -> trained, after each step -> close."""

    def begin(self, step: int) -> None: ...
    def trained(self, done: StepDone) -> None: ...
    def close(self) -> None: ...


@dataclass
class TrainLoop:
    """`run` once."""

    control: Control
    batches: Batches
    trainer: Trainer
    versions: Versions
    checkpoints: CheckpointWriter
    observers: Sequence[Observer] = ()

    def run(self) -> None:
        """Until the last step, or until `control.stop`."""
        try:
            step = self._resume()
            for observer in self.observers:
                observer.begin(step)
            self._loop(step)
        except BaseException:
            self.control.update(state="stopped")  # from here on no other rank is needed
            raise
        finally:
            self.versions.close()
            for observer in self.observers:
                observer.close()

    def _loop(self, step: int) -> None:
        while True:
            match self.batches.next(step):
                case Train(raw):
                    step = self._end_step(self._train(raw))
                case Skip(raw):
                    step = self._end_step(skipped(raw))
                case Save():
                    self.checkpoints.save(step)
                case RollBack():
                    self._roll_back(step)
                case Stop():
                    self.checkpoints.settle()
                    log.info("trainer.stopped", step=step)
                    return
                case Finish():
                    self.checkpoints.settle()
                    self.control.update(state="finished", waiting_for="")
                    self.versions.finish()
                    log.info("trainer.finished", step=step)
                    return

    def _resume(self) -> int:
        step, rollback = self.checkpoints.resume()
        self.control.on_loaded()
        self.batches.open(step)
        self.versions.open(step, rollback)
        if self.versions.rollback_is_due(step):  # it happened while no trainer ran
            self._roll_back(step)
        else:
            self.versions.publish(step)  # does nothing unless a version was lost
        return step

    def _train(self, raw: RawBatch) -> StepDone:
        try:
            return self.trainer.train(raw)
        except BadStep as error:
            before = raw.entry.step - 1
            if not error.updates and before > self.control.progress.saved_step:
                self.checkpoints.save(before)  # the run that ends here loses no finished step
            self.checkpoints.settle()
            raise

    def _end_step(self, done: StepDone) -> int:
        self.versions.observe(done.batch)
        for observer in self.observers:
            observer.trained(done)
        self.versions.publish(done.step)
        self.checkpoints.save_if_due(done.step)
        return done.step

    def _roll_back(self, step: int) -> None:
        """Continue from an older version's weights. Checkpoints record it from now on; at step 0 there is none yet.

        A version that was due and could not be published meanwhile gets these weights: the next batch may wait for it.
        """
        self.checkpoints.settle()  # it may be the one that is loaded
        self.versions.roll_back()
        if step:
            self.checkpoints.save(step)
            self.versions.publish(step)
