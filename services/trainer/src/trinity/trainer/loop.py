"""The training loop: request step k, train, publish, save. Every rank runs it; rank 0 talks to the other services.

    resume -> (next -> train -> publish -> save) for every step -> finished

After a crash it resumes from the newest complete checkpoint, and the ledger answers with the same batches as before.
Versions published before the crash stay unchanged: weights of a step are published once.

A rollback is applied between steps: it loads the older version's weights, keeps the step count, and saves a checkpoint
at once. If a crash set the trainer back behind that version, the rollback waits until its step is reached again.

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
    """Chooses the next action. All methods of these parts are collectives: every rank calls them."""

    def open(self, step: int) -> None: ...
    def next(self, step: int) -> Command: ...


class Trainer(Protocol):
    """Trains a step's batch. Raises BadStep if that ends the run."""

    def train(self, raw: RawBatch) -> StepDone: ...


class Versions(Protocol):
    """Publishes weight versions. `publish` skips a step whose version is not due, or was published before a crash.

    A version is published in the background; `finish` and `close` wait for that.
    """

    def open(self, step: int, rollback: int) -> None: ...
    def observe(self, batch: TrainBatch) -> None: ...
    def publish(self, step: int) -> None: ...
    def rollback_is_due(self, step: int) -> bool: ...
    def roll_back(self) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


class CheckpointWriter(Protocol):
    """Saves checkpoints. `resume` returns the step of the loaded checkpoint, or 0, and its newest rollback.

    A saved step becomes a checkpoint in the background; `settle` waits for that.
    """

    def resume(self) -> tuple[int, int]: ...
    def save(self, step: int) -> None: ...
    def save_if_due(self, step: int) -> None: ...
    def settle(self) -> None: ...


class Observer(Protocol):
    """Watches the loop: begin -> trained, after each step -> close."""

    def begin(self, step: int) -> None: ...
    def trained(self, done: StepDone) -> None: ...
    def close(self) -> None: ...


@dataclass
class TrainLoop:
    """Runs the steps of a run. Call `run` once."""

    control: Control
    batches: Batches
    trainer: Trainer
    versions: Versions
    checkpoints: CheckpointWriter
    observers: Sequence[Observer] = ()

    def run(self) -> None:
        """Runs until the last step, or until `control.stop`."""
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
        if self.versions.rollback_is_due(step):  # since no trainer ran
            self._roll_back(step)
        else:
            self.versions.publish(step)  # only if a version was lost
        return step

    def _train(self, raw: RawBatch) -> StepDone:
        try:
            with self.control.together(f"step {raw.entry.step}"):
                return self.trainer.train(raw)
        except BadStep as error:
            before = raw.entry.step - 1
            if not error.updates and before > self.control.progress.saved_step:
                self.checkpoints.save(before)  # the run that ends here loses no finished step
            self.checkpoints.settle()
            raise

    def _end_step(self, done: StepDone) -> int:
        self.control.update(ledger_sha256=done.raw.entry.sha256.hex())
        self.versions.observe(done.batch)
        for observer in self.observers:
            observer.trained(done)
        self.versions.publish(done.step)
        self.checkpoints.save_if_due(done.step)
        return done.step

    def _roll_back(self, step: int) -> None:
        """Continues from an older version's weights, and saves them; at step 0 there is no checkpoint yet.

        A due version that could not be published before gets these weights, since the next batch may wait for it.
        """
        self.checkpoints.settle()  # the newest checkpoint may be loaded
        self.versions.roll_back()
        if step:
            self.checkpoints.save(step)
            self.versions.publish(step)
