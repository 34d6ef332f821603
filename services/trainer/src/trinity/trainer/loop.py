"""The training loop: ask for step k, train, publish, save. Every rank runs it; rank 0 talks to the other services.

    resume -> (receive -> train -> publish -> save) for every step -> finished

After a crash it resumes from the newest whole checkpoint, and the ledger answers with the same batches as before.
Versions that went out before the crash stay as they are: weights of a step are published once.

A rollback is applied between steps: it loads the older version's weights, keeps the step count, and saves a checkpoint
at once. If a crash took the trainer back behind that version, the rollback waits until its step is reached again.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Any, Literal

import structlog
import torch
from opentelemetry import trace

from trinity.config import Plan
from trinity.config.service import monitor_fields
from trinity.runtime import files, tracing
from trinity.runtime.errors import DataLoss
from trinity.runtime.metrics import Gauge, Histogram
from trinity.runtime.monitor import Monitor, MonitorOptions, open_monitor
from trinity.trainer.checkpoints import CheckpointStore, TrainerState
from trinity.trainer.control import Control
from trinity.trainer.data import kept, record
from trinity.trainer.data.bad_steps import BadStep, NotFinite
from trinity.trainer.data.batch import TrainBatch, from_groups
from trinity.trainer.data.client import BufferClient, RawBatch
from trinity.trainer.data.examples import experts_of, from_examples
from trinity.trainer.data.exchange import decode_batch, encode_batch, share_bytes, share_when_known
from trinity.trainer.engine import TrainEngine
from trinity.trainer.model.lora import write_adapters
from trinity.trainer.publishing import VersionPublisher
from trinity.trainer.ranks import Ranks
from trinity.trainer.times import StepTimes
from trinity.trainer.weights import CHECKPOINT_SHARD_BYTES, write_huggingface_index, write_shards
from trinity.trainer.weights.publisher import Publisher
from trinity.weights.checkpoints import copy_all_but_weights

log = structlog.get_logger(__name__)

STEP = Gauge("trinity_trainer_step", "Optimizer steps done")
SECONDS = Histogram(
    "trinity_trainer_step_seconds", "Parts of a step, in seconds", ["part"], buckets=(0.01, 0.1, 0.5, 1, 5, 30, 120)
)

# Instead of a batch: a request for a checkpoint while the batch is not there yet, or a rollback by an
# operator.
_INSTEAD: dict[bytes, Literal["save", "roll back"]] = {b"save": "save", b"roll back": "roll back"}


# Ranks that wait for a batch are told this often that there is none yet: torch ends a collective after ten minutes.
_NEWS_SECONDS = 20.0


class TrainLoop:
    """`run` once. `buffer` and `publisher` exist on rank 0 alone; without a publisher no process follows the weights.

    Checkpoints and monitor files go to `folder`: the job folder, unless another is given.
    """

    def __init__(
        self,
        plan: Plan,
        run: str,
        ranks: Ranks,
        engine: TrainEngine,
        control: Control,
        buffer: BufferClient | None,
        publisher: Publisher | None,
        folder: Path | None = None,
    ) -> None:
        self._plan = plan
        self._folder = folder or plan.job_dir
        self._run = run
        self._ranks = ranks
        self._engine = engine
        self._control = control
        self._buffer = buffer
        self._versions = VersionPublisher(plan, ranks, engine, control, publisher)
        self._store = CheckpointStore(self._folder)
        self._tokenizer: Any = None
        self._monitor: Monitor | None = None
        self._times = StepTimes()
        self._last_step = 0
        self._saved_step = 0
        self._tokens_trained = 0

    def run(self) -> None:
        """Until the last step, or until `control.stop`."""
        step = self._resume()
        if self._ranks.is_first:
            fields = {**monitor_fields(self._plan, "trainer"), "folder": self._folder / "monitor"}
            self._monitor = open_monitor(MonitorOptions(**fields), first_step=step)
        try:
            self._loop(step)
        finally:
            if self._monitor is not None:
                self._monitor.close()

    def _loop(self, step: int) -> None:
        if self._buffer is not None and step < self._last_step:
            self._buffer.start(step + 1)
        while step < self._last_step:
            raw = self._receive(step + 1)
            if raw is None:
                log.info("trainer.stopped", step=step)
                return
            if raw == "roll back":
                self._roll_back(step)
            elif raw == "save":
                self._save(step)
            if not isinstance(raw, RawBatch):
                continue
            step = self._train(raw)
            self._publish(step)
            self._save_if_due(step)
        if self._versions.rollback_is_due(step):
            self._roll_back(step)
        self._control.update(state="finished", waiting_for="")
        self._versions.finish()
        log.info("trainer.finished", step=step)

    def _resume(self) -> int:
        """Load the newest checkpoint, if there is one; returns its step."""
        state = self._store.newest() if self._plan.config.continue_from_checkpoint else None
        step = state.step if state else 0
        if state is not None:
            self._engine.load(self._store.path(step) / "actor")
            self._tokens_trained = state.tokens_trained
            self._saved_step = step
            log.info("trainer.resumed", step=step, path=str(self._store.path(step)))
        answer = str(int(self._buffer.rewind(step).last_step)).encode() if self._buffer is not None else None
        self._last_step = int(share_bytes(answer, self._ranks, self._engine.device))
        self._control.update(
            step=step, last_step=self._last_step, checkpoint_step=step, tokens_trained=self._tokens_trained
        )
        self._versions.open(step, state.rollback if state else 0)
        if self._versions.rollback_is_due(step):  # it happened while no trainer ran
            self._roll_back(step)
        elif step:
            self._publish(step)  # does nothing unless a version was lost
        return step

    def _roll_back(self, step: int) -> None:
        """Continue from an older version's weights. Checkpoints record it from now on; at step 0 there is none yet.

        A version that was due and could not be published meanwhile gets these weights: the next batch may wait for it.
        """
        self._versions.roll_back(self._store)
        if step:
            self._save(step)
            self._publish(step)

    def _receive(self, step: int) -> RawBatch | Literal["save", "roll back"] | None:
        """The batch of a step, on every rank; "save" or "roll back" if that comes first; None to stop."""
        begin, began = time.monotonic(), time.time()
        shared = share_when_known(lambda: self._wait_for_batch(step), self._ranks, self._engine.device)
        batch = decode_batch(shared) if shared and shared not in _INSTEAD else None
        seconds = time.monotonic() - begin
        SECONDS.labels("wait").observe(seconds)
        self._times.waited(began, began + seconds)
        return _INSTEAD.get(shared, batch)

    def _wait_for_batch(self, step: int) -> bytes | None:
        """Rank 0: the encoded batch; empty to stop, None after a while. Serves requests for a pause or a checkpoint.

        Raises errors that end the trainer: another trainer claimed the run, or a version was rejected.
        """
        assert self._buffer is not None
        unsaved = self._saved_step < step - 1
        end = time.monotonic() + _NEWS_SECONDS
        while not self._control.stopping:
            if time.monotonic() > end:
                return None
            if self._control.paused:
                self._control.update(state="paused")
                time.sleep(0.05)
                continue
            if self._versions.poll(step - 1):
                return b"roll back"
            self._control.update(state="waiting", waiting_for=self._buffer.waiting_for or f"the batch of step {step}")
            if unsaved and (self._buffer.checkpoint_wanted or self._control.take_checkpoint_request()):
                return b"save"
            batch = self._buffer.next(timeout_seconds=0.2)
            if batch is not None:
                if batch.entry.step != step:
                    raise DataLoss(f"the buffer sent step {batch.entry.step}, step {step} was asked for")
                self._control.update(state="training", waiting_for="")
                return encode_batch(batch)
        return b""

    def _train(self, raw: RawBatch) -> int:
        begin = time.monotonic()
        step = raw.entry.step
        batch, metrics = self._learn(raw)
        learnt = not metrics.keys() & {"bad_step", "skipped_step"}
        self._tokens_trained += batch.response_tokens if learnt else 0
        seconds = time.monotonic() - begin
        SECONDS.labels("train").observe(seconds)
        STEP.set(step)
        if self._ranks.is_first:
            self._report(batch, metrics, seconds)
            if self._plan.config.buffer.save_experiences and learnt:
                record.append(self._folder, raw.entry, batch)
            groups = [group.log_sequence for group in raw.entry.groups]
            self._note("batches.jsonl", {"step": step, "groups": groups, **self._circumstances(step)})
        return step

    def _learn(self, raw: RawBatch) -> tuple[TrainBatch, dict[str, float]]:
        """The batch and the step's metrics; a skipped bad step has none. Raises BadStep if none are skipped."""
        step = raw.entry.step
        batch = TrainBatch(step, ())
        if raw.entry.skip_reason:
            log.warning("trainer.step.skipped", step=step, reason=raw.entry.skip_reason)
            return batch, {"skipped_step": 1.0}
        try:
            batch = self._batch(raw)
            self._versions.observe(batch)
            links = [trace.Link(context) for context in _contexts(raw)]
            with tracing.span("trainer.step", links=links, step=step) as span:
                metrics = self._engine.train(batch, self._schedule_end(step))
                _close_traces(raw, step, span)
            return batch, metrics
        except BadStep as error:
            policy = self._plan.config.trainer.on_bad_step
            self._keep(raw, batch, error, policy)
            if policy == "stop":
                error.hint = f"; `trinity batch skip {step} --reason TEXT` passes it"
                self._save_before(step, error)
                raise
        return batch, {"bad_step": 1.0}

    def _keep(self, raw: RawBatch, batch: TrainBatch, error: BadStep, policy: str) -> None:
        """Write the batch and statistics of each group to the job folder. Names the groups that are not finite."""
        groups: list[dict[str, Any]] = []
        if batch.sequences and isinstance(error, NotFinite):
            with contextlib.suppress(BadStep):  # an advantage
                groups = self._engine.per_group_stats(batch)
        blamed = sorted({*error.groups, *(group["group"] for group in groups if not group["finite"])})
        error.groups = blamed
        if self._ranks.is_first:
            folder = kept.keep(self._folder, raw, error, policy, groups)
            log.error("trainer.step.bad", step=raw.entry.step, problem=error.problem, groups=blamed, policy=policy,
                      kept=str(folder))  # fmt: skip

    def _save_before(self, step: int, error: BadStep) -> None:
        """Save a checkpoint, so that the run that ends here loses no finished step."""
        if not error.updates and 0 < step - 1 != self._saved_step:
            self._save(step - 1)

    def _schedule_end(self, step: int) -> int:
        """The step at which the learning rate's schedule ends, as known at this step."""
        return self._last_step

    def _circumstances(self, step: int) -> dict[str, Any]:
        """All that determines the bits of a step's result beside batch and weights; a replay needs the same."""
        return {
            "last_step": self._schedule_end(step),
            "ranks": self._ranks.world_size,
            "device": self._engine.device.type,
            "threads": torch.get_num_threads(),
            "micro_batch_tokens": self._engine.micro_batch_tokens,
            "rollback": self._versions.rollback,
        }

    def _batch(self, raw: RawBatch) -> TrainBatch:
        outcomes, limit = [item.outcome for item in raw.groups], self._plan.lengths.model
        if not raw.examples:
            return from_groups(raw.entry, outcomes, self._plan.algorithm)
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            model = self._plan.config.model
            self._tokenizer = AutoTokenizer.from_pretrained(model.model_path, trust_remote_code=model.trust_remote_code)
        if self._plan.algorithm.offline:
            return from_examples(raw.entry, raw.examples, self._tokenizer, limit)
        experts = experts_of(raw.entry, raw.examples, self._tokenizer, limit)
        return from_groups(raw.entry, outcomes, self._plan.algorithm, experts)

    def _report(self, batch: TrainBatch, metrics: dict[str, float], seconds: float) -> None:
        named = {name if name.startswith("critic/") else f"actor/{name}": value for name, value in metrics.items()}
        named |= {"time/step": seconds, **self._times.metrics(batch.made_at_seconds)}
        named["perf/tokens_per_second"] = sum(s.length for s in batch.sequences) / seconds
        named["sample/response_tokens"] = float(batch.response_tokens)
        if not self._plan.algorithm.offline:
            rewards = [sequence.reward for sequence in batch.sequences if not sequence.expert]
            named["sample/reward_mean"] = sum(rewards) / max(1, len(rewards))
            named["sample/staleness_mean"] = batch.staleness_mean
            named["sample/staleness_max"] = batch.staleness_max
        self._control.update(step=batch.step, tokens_trained=self._tokens_trained, metrics=named)
        log.info("trainer.step.done", step=batch.step, **{k: round(v, 5) for k, v in named.items()})
        if self._monitor is not None:
            self._monitor.log(named, batch.step)

    def _note(self, file: str, entry: dict[str, Any]) -> None:
        """A line for monitor/<file>. A step trained again after a crash is noted again: the last line counts."""
        monitor = self._folder / "monitor"
        monitor.mkdir(parents=True, exist_ok=True)
        with (monitor / file).open("a") as lines:
            lines.write(json.dumps(entry) + "\n")

    def _publish(self, step: int) -> None:
        begin = time.monotonic()
        if self._versions.publish(step, due=self._plan.staleness.publishes(step, self._last_step)):
            if self._ranks.is_first:
                files.write_atomic(self._plan.job_dir / "latest_state_dict_iteration.txt", str(step).encode())
            seconds = time.monotonic() - begin
            SECONDS.labels("publish").observe(seconds)
            self._times.spent("publish", seconds)

    def _save_if_due(self, step: int) -> None:
        interval = self._plan.config.trainer.save_interval
        asked = self._control.take_checkpoint_request() if self._ranks.is_first else False
        asked = share_bytes(b"1" if asked else b"0" if self._ranks.is_first else None, self._ranks,
                            self._engine.device) == b"1"  # fmt: skip
        if step == self._last_step or asked or (interval and step % interval == 0):
            self._save(step)

    def _save(self, step: int) -> None:
        self._control.update(state="saving")
        begin = time.monotonic()
        if self._ranks.is_first:
            self._store.begin(step)
        share_bytes(b"begun" if self._ranks.is_first else None, self._ranks, self._engine.device)
        folder = self._store.temporary(step) / "actor"
        self._engine.save(folder, {"step": step})
        self._save_adapters(folder / "lora_adapter")
        self._save_huggingface(folder / "huggingface", step)
        share_bytes(b"written" if self._ranks.is_first else None, self._ranks, self._engine.device)
        if not self._ranks.is_first:
            return
        state = TrainerState(
            run=self._run,
            step=step,
            tokens_trained=self._tokens_trained,
            world_size=self._ranks.world_size,
            zero_stage=self._engine.zero_stage,
            rollback=self._versions.rollback,
        )
        oldest = self._store.finish(state, self._plan.config.trainer.max_checkpoints_to_keep)
        committing = time.monotonic()
        self._commit(step, oldest)
        self._saved_step = step
        self._control.update(checkpoint_step=step)
        SECONDS.labels("save").observe(time.monotonic() - begin)
        self._times.spent("save", committing - begin)
        self._times.spent("buffer", time.monotonic() - committing)
        log.info("trainer.checkpoint.saved", step=step, path=str(self._store.path(step)))

    def _commit(self, step: int, oldest: int) -> None:
        """Tell the buffer which checkpoints are durable."""
        assert self._buffer is not None
        self._buffer.commit(step, oldest)

    def _save_huggingface(self, folder: Path, step: int) -> None:
        """Config and tokenizer always, weights if asked for. A collective under ZeRO-3."""
        choice = self._plan.config.trainer.save_hf_checkpoint
        with_weights = choice == "always" or (choice == "last" and step == self._last_step)
        if not self._ranks.is_first:
            if with_weights:
                for _ in self._engine.weights():
                    pass
            return
        folder.mkdir(parents=True, exist_ok=True)
        save_model_files(self._plan.config.model.model_path, folder, self._engine.policy.model.config)
        if with_weights:
            layout, weights = self._engine.whole_weights()
            found = write_shards(weights, layout, folder, "model-{:05d}.safetensors", CHECKPOINT_SHARD_BYTES)
            write_huggingface_index(folder, *found)

    def _save_adapters(self, folder: Path) -> None:
        """LoRA adapters for peft: they are small, so every checkpoint has them. A collective under ZeRO-3."""
        lora, weights = self._engine.lora, self._engine.weights()
        if lora is None:
            return
        if self._ranks.is_first:
            write_adapters(folder, lora, self._plan.config.model.model_path, weights)
        for _ in weights:
            pass


def save_model_files(source: str, target: Path, config: Any) -> None:
    """Everything of a model but its weights: config, tokenizer, chat template."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        copy_all_but_weights(folder, target)
        return
    from transformers import AutoTokenizer

    config.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def _contexts(raw: RawBatch) -> list[trace.SpanContext]:
    """Span contexts the groups came with."""
    contexts = []
    for group in raw.groups:
        if group.traceparent:
            parent = tracing.extract({"traceparent": group.traceparent})
            contexts.append(trace.get_current_span(parent).get_span_context())
    return [context for context in contexts if context.is_valid]


def _close_traces(raw: RawBatch, step: int, span: trace.Span) -> None:
    """The last span of every task's trace: its experience was trained, in the linked step."""
    link = trace.Link(span.get_span_context())
    for member, group in zip(raw.entry.groups, raw.groups, strict=True):
        if group.traceparent:
            parent = tracing.extract({"traceparent": group.traceparent})
            with tracing.span("experience.train", parent=parent, links=[link], step=step, task_id=member.task_id):
                pass
