"""Trains one step from its ledger entry, or stores its batch if it is bad."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.context import Context, get_current

from trinity.config import Plan
from trinity.data.templates import chat_template, load_tokenizer, refuse_unembedded
from trinity.runtime import tracing
from trinity.trainer.data import bad_steps
from trinity.trainer.data.bad_steps import BadStep, NotFinite
from trinity.trainer.data.batch import TrainBatch, TrainSequence, from_groups
from trinity.trainer.data.client import RawBatch
from trinity.trainer.data.examples import experts_of, from_examples
from trinity.trainer.engine.engine import TrainEngine
from trinity.trainer.engine.token_record import TokenValues

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class StepDone:
    """A step after which the loop continues: trained in `seconds`, or passed, with a metric that names the reason.

    batch: as it was trained; for a bad step as it was decoded. tokens: the token values of each sequence, on rank 0 if
    StepTrainer records them. span: the context of the step's span.
    """

    raw: RawBatch
    batch: TrainBatch
    metrics: dict[str, float]
    seconds: float = 0.0
    span: Context = field(default_factory=Context)
    tokens: Sequence[TokenValues | None] = ()

    @property
    def step(self) -> int:
        return self.batch.step

    @property
    def trained(self) -> bool:
        return not self.metrics.keys() & {"bad_step", "skipped_step"}


def skipped(raw: RawBatch) -> StepDone:
    """Returns a step that an operator passes untrained."""
    log.warning("trainer.step.skipped", step=raw.entry.step, reason=raw.entry.skip_reason)
    return StepDone(raw, TrainBatch(raw.entry.step, ()), {"skipped_step": 1.0})


@dataclass
class StepTrainer:
    """Trains steps. schedule_end(step): the end of the learning rate's schedule, as known at this step.

    records_tokens: StepDone has `tokens`.
    """

    plan: Plan
    engine: TrainEngine
    is_first: bool
    folder: Path
    schedule_end: Callable[[int], int]
    records_tokens: bool = False
    _tokenizer: Any = field(default=None, init=False)

    def train(self, raw: RawBatch) -> StepDone:
        """Trains the step. Stores the batch of a bad step, and raises BadStep if that ends the run."""
        begin = time.monotonic()
        step, policy = raw.entry.step, self.plan.config.trainer.on_bad_step
        batch, metrics, span = TrainBatch(step, ()), {"bad_step": 1.0}, Context()
        record, tokens = self.engine.token_record() if self.records_tokens else None, list[TokenValues | None]()
        try:
            batch = self.decode(raw)
            with _step_span(raw):
                span = get_current()
                batch, metrics = self.engine.train_batch(batch, self.schedule_end(step), record)
                tokens = record.values(batch.sequences) if record is not None else tokens
        except BadStep as error:
            with tracing.within(span):
                self._store(raw, batch, error, policy)
            if policy == "stop":
                error.hint = f"; `trinity batch skip {step} --reason TEXT` passes it"
                raise
        return StepDone(raw, batch, metrics, time.monotonic() - begin, span, tokens)

    def decode(self, raw: RawBatch) -> TrainBatch:
        """Decodes a batch. Raises BadStep if a group cannot be decoded, or a reward or advantage is not finite.

        Raises InvalidInput for a model without a usable tokenizer, or without an embedding of a row's token.
        """
        outcomes, limit = [item.outcome for item in raw.groups], self.plan.lengths.model
        if not raw.examples:
            return from_groups(raw.entry, outcomes, self.plan.algorithm)
        if self._tokenizer is None:
            model = self.plan.config.model
            self._tokenizer = load_tokenizer(model)
            if self.plan.algorithm.rows != "text":
                chat_template(model, self._tokenizer)
        if self.plan.algorithm.offline:
            batch = from_examples(raw.entry, raw.examples, self._tokenizer, limit)
            self._refuse_unembedded(batch.sequences)
            return batch
        experts = experts_of(raw.entry, raw.examples, self._tokenizer, limit)
        self._refuse_unembedded(experts)
        return from_groups(raw.entry, outcomes, self.plan.algorithm, experts)

    def _refuse_unembedded(self, sequences: Sequence[TrainSequence]) -> None:
        largest = max((int(one.token_ids.max(initial=-1)) for one in sequences), default=-1)
        refuse_unembedded(self._tokenizer, largest, self.engine.vocabulary)

    def _store(self, raw: RawBatch, batch: TrainBatch, error: BadStep, policy: str) -> None:
        """Writes the batch and its groups' statistics, and names in the error the groups that are not finite."""
        groups: list[dict[str, Any]] = []
        if batch.sequences and isinstance(error, NotFinite):
            with contextlib.suppress(BadStep):  # raised for an advantage that is not finite
                groups = self.engine.per_group_stats(batch)
        error.groups = sorted({*error.groups, *(group["group"] for group in groups if not group["finite"])})
        if self.is_first:
            folder = bad_steps.store(self.folder, raw, error, policy, groups)
            log.error("trainer.step.bad", step=raw.entry.step, problem=error.problem, groups=error.groups,
                      policy=policy, stored=str(folder))  # fmt: skip


@contextlib.contextmanager
def _step_span(raw: RawBatch) -> Iterator[None]:
    """Opens the step's span, linked to those of its tasks; at its end adds the last span to every task's trace."""
    pairs = zip(raw.entry.groups, raw.groups, strict=True)
    tasks = [(m.task_id, tracing.extract({"traceparent": g.traceparent})) for m, g in pairs if g.traceparent]
    contexts = [trace.get_current_span(parent).get_span_context() for _, parent in tasks]
    links = [trace.Link(context) for context in contexts if context.is_valid]
    with tracing.span("trainer.step", links=links, step=raw.entry.step) as span:
        yield
        link = trace.Link(span.get_span_context())
        for task_id, parent in tasks:
            with tracing.span("experience.train", parent=parent, links=[link], step=raw.entry.step, task_id=task_id):
                log.debug("trainer.group.trained", step=raw.entry.step, task=task_id)
