"""Weight versions for the training loop, on every rank; rank 0 publishes them.

    open -> (observe -> publish)* , with a roll_back between steps if `poll` returns True -> finish -> close

A step's weights are copied to host memory, and a thread publishes the copy, from its first tensors on, while the next
step trains or waits for its batch. One version is published at a time. A version exists once sync has it: after a crash
before that, the weights of the same step are published, from the checkpoint or trained again.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
import torch

from trinity.config import Plan
from trinity.config.parents import parent_of
from trinity.data.images import PlacedImage, placed
from trinity.runtime import files
from trinity.runtime.errors import TrinityError
from trinity.trainer.data.batch import TrainBatch
from trinity.trainer.engine import TrainEngine
from trinity.trainer.engine.checkpoint_store import CheckpointStore
from trinity.trainer.engine.weights import read_all
from trinity.trainer.process.control import Control
from trinity.trainer.process.exchange import Exchange
from trinity.trainer.process.times import SECONDS, StepTimes
from trinity.trainer.weights.canary import (
    Tokens,
    make_canary,
    picture_probe,
    probe_of_batch,
    pseudo_random_probe,
    quantized_factor,
    rounding_counts,
    tolerances,
    widened,
)
from trinity.trainer.weights.publisher import Publisher
from trinity.trainer.weights.shards import Snapshot, Weights
from trinity.weights.manifest import Canary, TensorInfo

log = structlog.get_logger(__name__)


class NoVersions:
    """Publishes nothing: for runs that learn from disk, and for replays."""

    rollback = 0

    def open(self, step: int, rollback: int) -> None: ...
    def observe(self, batch: TrainBatch) -> None: ...
    def publish(self, step: int) -> None: ...
    def roll_back(self) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...

    def poll(self, step: int) -> bool:
        return False

    rollback_is_due = poll


@dataclass
class VersionPublisher:
    """publisher: None on ranks but the first. rollback: number of the newest rollback applied to the weights."""

    plan: Plan
    exchange: Exchange
    engine: TrainEngine
    control: Control
    publisher: Publisher | None
    checkpoints: CheckpointStore
    times: StepTimes
    rollback: int = field(default=0, init=False)
    _probe: Tokens = field(default=(), init=False)
    _snapshot: Snapshot = field(init=False)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "publish"), init=False)
    _reserving: "Future[None] | None" = field(default=None, init=False)
    _publishing: "Future[None] | None" = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._snapshot = Snapshot(self.engine.device, self.publisher.memory if self.publisher is not None else None)
        parent = parent_of(self.plan.job_dir)
        self._forked_at = parent.step if parent is not None else None  # explorers of a fork have no older weights

    def open(self, step: int, rollback: int) -> None:
        """Resumes the run at its newest versions; a new run publishes its initial model as version 0.

        `step` and `rollback` are those of the weights in the engine.
        """
        self.rollback = rollback
        opening: dict[str, Any] = {}
        if self.publisher is not None:
            with self._reporting_end():
                found = self.publisher.open(rollback)
                self.publisher.check_lost(step)
            opening = {"is_new": found.is_new, "probe": found.probe}
        opening = self.exchange.share(opening)
        self._probe = tuple(tuple(tokens) for tokens in opening["probe"])
        if opening["is_new"]:
            self._announce_base(step)
        if self.publisher is not None:  # pinning takes half a second a GB: here explorers do not wait for it yet
            self._reserving = self._thread.submit(self._snapshot.reserve, self.engine.weights.layout())
        self._show()

    def _announce_base(self, step: int) -> None:
        """Publishes version 0, with a canary unless the engine has the weights of a later step."""
        probe = pseudo_random_probe(self.engine.vocabulary) if step == 0 else ()
        with self.control.together("the publication of version 0"):
            canary = self._canary(probe, step)
        if self.publisher is not None:
            given = self.engine.weights.given()
            layout = self.engine.weights.layout() if given else []
            self.publisher.announce_base(self.plan.config.model.model_path, canary, layout, given)

    def observe(self, batch: TrainBatch) -> None:
        """Takes the canary's probe from the first batch."""
        if not self._probe:
            self._probe = probe_of_batch(batch)

    def publish(self, step: int) -> None:
        """Begins to publish the weights of a step if their version is due, unless it was published before a crash.

        For other steps it only writes lost files again. Waits for the version before, and raises its error.
        """
        begin = time.monotonic()
        self._settle()
        due = self.plan.staleness.publishes(step, self.control.progress.last_step) or step == self._forked_at
        if not self.exchange.share(self.publisher is not None and self.publisher.wants(step, due)):
            return
        what = f"the publication of step {step}"
        with self.control.together(what):
            canary = self._canary(self._probe or pseudo_random_probe(self.engine.vocabulary), step)
        if self.publisher is None:
            read_all(self.engine.weights.read())
        else:
            if self._reserving is not None:
                self._reserving.result()
            layout = self.engine.weights.layout()
            entry = bytes.fromhex(self.control.progress.ledger_sha256)
            weights = self._snapshot.expect(layout)
            self._publishing = self._thread.submit(self._publish, self.publisher, step, layout, weights, canary, entry)
            try:
                with self.control.together(what):
                    weights.take(layout, self.control.each(what, self.engine.weights.read()))
            except BaseException:
                weights.abandon()
                raise
        self.times.spent("publish", time.monotonic() - begin)

    def _publish(
        self,
        publisher: Publisher,
        step: int,
        layout: Sequence[TensorInfo],
        weights: Snapshot,
        canary: Canary | None,
        entry: bytes,
    ) -> None:
        """Runs in the thread, with a separate stream so that it does not wait for the next step's kernels.

        entry: digest of the step's ledger entry.
        """
        begin, device = time.monotonic(), self.engine.device
        with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext():
            if self.plan.config.reproducible:
                publisher.wait_for_verification(lambda: self.control.stopping)
            if publisher.publish(step, layout, weights, canary, entry):
                publisher.broadcast(weights)
        weights.reserve(layout)  # if its memory is the version's now
        files.write_atomic(self.plan.job_dir / "latest_state_dict_iteration.txt", str(step).encode())
        SECONDS.labels("publish_in_background").observe(time.monotonic() - begin)

    def _settle(self) -> None:
        """Waits until no version is being published. Raises the newest version's error."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            with self._reporting_end():
                publishing.result()
            self._show()

    def close(self) -> None:
        """Waits for a version that is being published, and logs its error."""
        try:
            self._settle()
        except Exception as error:
            log.error("trainer.version.not_published", reason=str(error))
        self._thread.shutdown()
        self._snapshot.close()

    def _canary(self, probe: Tokens, step: int) -> Canary | None:
        if not self.plan.config.synchronizer.canary or not probe:
            return None
        engine, allowed = self.engine, allowed_by(self.plan, self.engine)
        images: list[tuple[bytes, ...]] = []
        shown: list[tuple[PlacedImage, ...]] = []
        if engine.image_rules is not None:
            tokens, picture = picture_probe(engine.vocabulary, engine.image_rules)
            probe, images = (tokens, *probe), [(picture,)]
            shown = [placed(tokens, [picture], engine.image_rules)]
        rounds = rounding_counts(self.plan, engine.trains_in_float32, engine.device.type == "cuda")
        logprobs, of_other_head = engine.probe_logprobs(probe, shown, both_heads=rounds)
        if rounds:
            allowed = widened(allowed, logprobs, of_other_head)
        made = make_canary(probe, logprobs, allowed, step, images)
        return replace(made, quantized_factor=quantized_factor(self.plan, allowed))

    def poll(self, step: int) -> bool:
        """Returns True on rank 0 if a rollback is to be applied after this step. Raises errors that end the trainer.

        A trainer that a crash set back before the rollback's version first trains the steps up to it again: applied
        earlier, these batches would be trained twice, and earlier checkpoints would have that version's weights.
        """
        if self.publisher is None:
            return False
        with self._reporting_end():
            self.publisher.check()
            if self._publishing is not None and not self._publishing.done() and self.publisher.due_rollback is None:
                return False  # the thread polls
            self._settle()
            self.publisher.poll()
        self._show()
        due = self.publisher.due_rollback
        return due is not None and due.version <= step

    def rollback_is_due(self, step: int) -> bool:
        """Returns rank 0's `poll` on every rank. A collective."""
        return self.exchange.share(self.poll(step))

    def roll_back(self) -> None:
        """Loads the version of the newest rollback into the engine. A collective.

        Loads the checkpoint of its step, with the optimizer, if there is one; else the version's files, and resets the
        optimizer.
        """
        due = self.publisher.due_rollback if self.publisher is not None else None
        source: dict[str, Any] = {}
        if due is not None:
            has_checkpoint = due.version in self.checkpoints.steps()
            source = {"number": due.number, "version": due.version, "has_checkpoint": has_checkpoint}
        source = self.exchange.share(source)
        version = source["version"]
        if source["has_checkpoint"]:
            unverified = self.plan.config.allow_unverified_checkpoint
            self.checkpoints.load(version, self.engine, self.exchange, unverified=unverified)
        else:
            weights: Weights | None = None
            if self.publisher is not None:
                weights = self.engine.weights.base() if version == 0 else self.publisher.read(version)
            what = f"the rollback to version {version}"
            with self.control.together(what):
                self.engine.weights.load(None if weights is None else self.control.each(what, weights))
        self.rollback = source["number"]
        if self.publisher is not None and due is not None:
            self.publisher.follows(due)
        self._show()
        log.warning("trainer.rolled_back", **source)

    def finish(self) -> None:
        """Waits for the last version, and for its verification while an explorer can do it.

        A trainer that reads stored groups may end before its run's explorers have started, which evaluate the version.
        """
        if self.publisher is None:
            return
        self._settle()
        with self._reporting_end():
            config = self.plan.config
            evaluates = config.mode == "both" and bool(config.buffer.explorer_input.eval_tasksets)
            self.publisher.settle(config.synchronizer.sync_timeout, lambda: self.control.stopping, evaluates)
        self._show()

    @contextlib.contextmanager
    def _reporting_end(self) -> Iterator[None]:
        """Sets the trainer's status to stopped if an error ends it."""
        try:
            yield
        except TrinityError:
            self.control.update(state="stopped")
            raise

    def _show(self) -> None:
        if self.publisher is not None:
            self.control.update(version=self.publisher.live_version)


def allowed_by(plan: Plan, engine: TrainEngine) -> tuple[float, float]:
    """Returns the canary's tolerances for this trainer."""
    return tolerances(plan, engine.trains_in_float32, engine.device.type == "cuda")
