"""Weight versions for the training loop, on every rank; rank 0 publishes them.

    open -> (observe -> publish)* , with a roll_back between steps where `poll` asks for one -> finish

Without a publisher on rank 0 (learning from disk) no process follows the weights, and every call does nothing.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import structlog

from trinity.config import Plan
from trinity.runtime.errors import TrinityError
from trinity.trainer.checkpoints import CheckpointStore
from trinity.trainer.control import Control
from trinity.trainer.data.batch import TrainBatch
from trinity.trainer.data.exchange import share_bytes
from trinity.trainer.engine import TrainEngine
from trinity.trainer.ranks import Ranks
from trinity.trainer.weights.canary import (
    Tokens,
    make_canary,
    probe_of_batch,
    pseudo_random_probe,
    rounding_counts,
    tolerances,
    widened,
)
from trinity.trainer.weights.publisher import Publisher
from trinity.trainer.weights.shards import Weights
from trinity.weights import Canary

log = structlog.get_logger(__name__)


class VersionPublisher:
    """`publisher` exists on rank 0 alone. `rollback` is the number of the newest rollback applied to the weights."""

    def __init__(
        self, plan: Plan, ranks: Ranks, engine: TrainEngine, control: Control, publisher: Publisher | None
    ) -> None:
        self._plan = plan
        self._ranks = ranks
        self._engine = engine
        self._control = control
        self._publisher = publisher
        self._exist = not plan.offline
        self._probe: Tokens = ()
        self.rollback = 0

    def open(self, step: int, rollback: int) -> None:
        """Resume the run at its newest versions; in a new run the base model becomes version 0.

        `step` and `rollback` are those of the weights in the engine.
        """
        self.rollback = rollback
        if not self._exist:
            return
        opening: dict[str, Any] = {}
        if self._publisher is not None:
            with self._reporting_end():
                found = self._publisher.open(rollback)
                self._publisher.check_lost(step)
            opening = {"is_new": found.is_new, "probe": found.probe}
        opening = self._shared(opening)
        self._probe = tuple(tuple(tokens) for tokens in opening["probe"])
        if opening["is_new"]:
            self._announce_base(step)
        self._show()

    def _announce_base(self, step: int) -> None:
        """Its canary can only be computed while the engine still has the base model."""
        probe = pseudo_random_probe(self._engine.vocabulary) if step == 0 else ()
        canary = self._canary(probe, step)
        if self._publisher is not None:
            self._publisher.announce_base(self._plan.config.model.model_path, canary)

    def observe(self, batch: TrainBatch) -> None:
        """Take the canary's probe from the first batch."""
        if self._exist and not self._probe:
            self._probe = probe_of_batch(batch)

    def publish(self, step: int, due: bool = True) -> bool:
        """Publish the weights as a version, unless a crash happened after that. Returns whether it was done.

        `due`: whether the weights of this step become a version; for other steps only lost files are written again.
        """
        wanted = self._publisher is not None and self._publisher.wants(step, due)
        if not self._exist or not self._shared(wanted):
            return False
        canary = self._canary(self._probe or pseudo_random_probe(self._engine.vocabulary), step)
        weights, again = self._engine.weights(), False
        if self._publisher is not None:
            with self._reporting_end():
                again = self._publisher.publish(step, self._engine.layout(), weights, canary)
        for _ in weights:
            pass
        if self._shared(again):
            self._broadcast()
        self._show()
        return True

    def _broadcast(self) -> None:
        """Broadcast the weights to the collective group. Every rank iterates over all of them, even after an error."""
        weights = self._engine.weights()
        try:
            if self._publisher is not None:
                self._publisher.broadcast(weights)
        finally:
            for _ in weights:
                pass

    def _canary(self, probe: Tokens, step: int) -> Canary | None:
        if not self._plan.config.synchronizer.canary or not probe:
            return None
        engine, allowed = self._engine, allowed_by(self._plan, self._engine)
        logprobs = engine.probe_logprobs(probe)
        if rounding_counts(self._plan, engine.trains_in_float32, engine.device.type == "cuda"):
            allowed = widened(allowed, logprobs, engine.probe_logprobs(probe, other_head=True))
        return make_canary(probe, logprobs, allowed, step)

    def poll(self, step: int) -> bool:
        """Rank 0, after a step: whether a rollback is to be applied now. Raises errors that end the trainer.

        After a crash that took it back behind the rollback's version the trainer first trains the batches up to it
        again: on top of that version they would be trained twice, and earlier checkpoints would have its weights.
        """
        if self._publisher is None:
            return False
        with self._reporting_end():
            self._publisher.poll()
        self._show()
        due = self._publisher.due_rollback
        return due is not None and due.version <= step

    def rollback_is_due(self, step: int) -> bool:
        """`poll`, on every rank together."""
        return self._exist and bool(self._shared(self.poll(step)))

    def roll_back(self, checkpoints: CheckpointStore) -> None:
        """Put the weights of the newest rollback's version into the engine, on every rank together.

        From the checkpoint of its step, with the optimizer, if there is one; else from the version's files, with a
        reset optimizer.
        """
        due = self._publisher.due_rollback if self._publisher is not None else None
        source: dict[str, Any] = {}
        if due is not None:
            has_checkpoint = due.version in checkpoints.steps()
            source = {"number": due.number, "version": due.version, "has_checkpoint": has_checkpoint}
        source = self._shared(source)
        version = source["version"]
        if source["has_checkpoint"]:
            self._engine.load(checkpoints.path(version) / "actor")
        else:
            self._engine.load_weights(self._files_of(version))
        self.rollback = source["number"]
        if self._publisher is not None and due is not None:
            self._publisher.follows(due)
        self._show()
        log.warning("trainer.rolled_back", **source)

    def _files_of(self, version: int) -> Weights | None:
        if self._publisher is None:
            return None
        return self._engine.base_weights() if version == 0 else self._publisher.read(version)

    def finish(self) -> None:
        """All steps are done: wait for the last version's verification while an explorer can do it."""
        if self._publisher is None:
            return
        with self._reporting_end():
            self._publisher.settle(self._plan.config.synchronizer.sync_timeout, lambda: self._control.stopping)
        self._show()

    @contextlib.contextmanager
    def _reporting_end(self) -> Iterator[None]:
        """Reports in the trainer's status that it ends."""
        try:
            yield
        except TrinityError:
            self._control.update(state="stopped")
            raise

    def _show(self) -> None:
        if self._publisher is not None:
            self._control.update(version=self._publisher.live_version)

    def _shared(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        data = json.dumps(value).encode() if self._ranks.is_first else None
        return json.loads(share_bytes(data, self._ranks, self._engine.device))


def allowed_by(plan: Plan, engine: TrainEngine) -> tuple[float, float]:
    """The canary's tolerances for this trainer."""
    return tolerances(plan, engine.trains_in_float32, engine.device.type == "cuda")
