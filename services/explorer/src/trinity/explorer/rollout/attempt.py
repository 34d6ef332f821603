"""One attempt at a task: run its workflow under a deadline, and store the outcome in the log."""

import asyncio
import time
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import structlog

from trinity.config.schema.explorer import DynamicTimeoutConfig
from trinity.data.experience import (
    UNLIMITED,
    AttemptFailure,
    Experience,
    Group,
    Limits,
    Outcome,
    Task,
    TaskKind,
    Truncation,
)
from trinity.data.wire import encode_outcome, encode_reference
from trinity.explorer.environments import slots as episode_slots
from trinity.explorer.environments.client import EnvironmentCause, EnvironmentFailed, ScorerFailed
from trinity.explorer.journal.journal import Journals, TaskJournal
from trinity.explorer.types import EngineFailed
from trinity.explorer.weights.load_history import WeightsWithdrawn
from trinity.explorer.workflows import WORKFLOWS, Toolbox, find_workflow, seeds
from trinity.explorer.workflows.base import Workflow, contained, gather_rollouts
from trinity.runtime import headers, tracing
from trinity.runtime.broker import Broker, PublishRefused, blobs, new_message_id
from trinity.runtime.errors import FailureCause, InvalidInput, Unavailable, text_of
from trinity.runtime.metrics import Counter, Histogram
from trinity.runtime.names import RunNames, owner_of

log = structlog.get_logger(__name__)


class _LimitReached(Exception):
    """The attempt reached its time limit."""


GROUPS = Counter("trinity_explorer_groups_total", "Groups stored", ["kind"])
PROMPTS_CUT = Counter("trinity_explorer_prompts_cut_total", "Groups stored whose prompt was cut", ["kind"])
FAILURES = Counter("trinity_explorer_attempts_failed_total", "Attempts that failed", ["cause"])
for _cause in FailureCause:
    FAILURES.labels(_cause)  # a rate needs a sample from before the first failure
SECONDS = Histogram(
    "trinity_explorer_attempt_seconds",
    "Duration of an attempt, in seconds",
    buckets=(0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800),
)

_CAUSES: list[tuple[type[BaseException], FailureCause]] = [
    (_LimitReached, FailureCause.TIMEOUT),
    (EngineFailed, FailureCause.ENGINE_ERROR),
    (WeightsWithdrawn, FailureCause.ENGINE_ERROR),
    (ScorerFailed, FailureCause.SCORER_ERROR),
    (EnvironmentFailed, FailureCause.ENVIRONMENT_ERROR),
]
# Rollouts are sampled again after weights were withdrawn or a provider was lost. That does not count against the task,
# up to this many times per attempt.
_SAMPLED_AGAIN = 3
# Deliveries beyond the allowed attempts after which the task is assumed to kill its explorers.
_SILENT_DEATHS = 5
_HEADROOM_BYTES = 64 * 1024

_Stored = TypeVar("_Stored")


@dataclass(frozen=True)
class Receipt:
    """JetStream's acknowledgement: the sequence in the stream, and the checksum of the message.

    `duplicate`: an earlier try had stored it, with an answer that was lost.
    """

    sequence: int
    crc32: int
    duplicate: bool


class Patience:
    """The time limit of attempts: explorer.max_timeout, or less with explorer.dynamic_timeout.

    The dynamic limit is a multiple of the mean of this explorer's attempts at the taskset. An attempt that reached its
    limit counts with it, so limits that became too short grow again. Evaluations keep explorer.max_timeout, because
    only their short answers would count.
    """

    def __init__(self, config: DynamicTimeoutConfig, tasks_per_step: int) -> None:
        self._ratio = config.ratio if config.enable else None
        self._first = max(1, config.warmup_min_steps * tasks_per_step)
        self._attempts: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)

    def limit_seconds(self, task: Task) -> float:
        """The limit of the next attempt at this task."""
        attempts = self._attempts[task.taskset]
        if self._ratio is None or task.kind is TaskKind.EVALUATION or attempts < self._first:
            return task.timeout_seconds
        return min(task.timeout_seconds, self._ratio * self._seconds[task.taskset] / attempts)

    def count(self, task: Task, seconds: float) -> None:
        """Note that an attempt took `seconds` for a group, or reached its limit after them."""
        if task.kind is not TaskKind.EVALUATION:
            self._attempts[task.taskset] += 1
            self._seconds[task.taskset] += seconds


async def explore(
    task: Task,
    attempt: int,
    explorer_id: str,
    tools: Toolbox,
    limits: Limits = UNLIMITED,
    aside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    journals: Journals | None = None,
    patience: Patience | None = None,
) -> Outcome:
    """Make the task's group within `limits`, or describe the failure. Only raises EngineFailed and cancellation.

    `aside`: the context in which the task waits for a provider that is away. `journals`: episodes continue where a dead
    explorer left them; attempts that got further than all before them, or returned their lease, do not count as deaths.
    `patience` may shorten the task's time limit.
    """
    journal = await journals.open(task, attempt) if journals is not None else None
    if attempt - (journal.progressed if journal is not None else 0) > task.max_attempts + _SILENT_DEATHS:
        error = RuntimeError(f"delivered {attempt} times; no explorer reported a result")
        return _failure(task, attempt, explorer_id, FailureCause.LEASE_LOST, error, final=True)
    begin, limit = time.time(), patience.limit_seconds(task) if patience is not None else task.timeout_seconds
    try:
        with tracing.span("task.explore", task_id=task.task_id, attempt=attempt, explorer=explorer_id):
            workflow = find_workflow(task.workflow)
            if workflow is None:
                raise InvalidInput("task.workflow", f"{task.workflow!r} is unknown; known: {', '.join(WORKFLOWS)}")
            experiences, seconds = await _run(workflow, task, limit, tools, aside, journal)
            if patience is not None:
                patience.count(task, seconds)
            if journal is not None:
                await journal.settle()
            group = Group(task, attempt, explorer_id, tuple(experiences), begin, time.time())
            try:
                encode_outcome(group)  # the log takes it, or the failure names the field
                group.check(limits)
            except InvalidInput as error:
                return _failure(task, attempt, explorer_id, FailureCause.INVALID_EXPERIENCE, error, final=True)
            return group
    except EngineFailed:
        if journal is not None:
            await journal.settle()
        raise
    except Exception as error:
        cause = next((cause for kind, cause in _CAUSES if isinstance(error, kind)), FailureCause.WORKFLOW_ERROR)
        if cause is FailureCause.TIMEOUT:
            key = "explorer.max_timeout" if limit == task.timeout_seconds else "explorer.dynamic_timeout"
            error = TimeoutError(f"the attempt took longer than {limit:.4g} s ({key})")
            if patience is not None:
                patience.count(task, limit)
        if journal is not None:
            await journal.abandon(cause)
        return _failure(task, attempt, explorer_id, cause, error)
    finally:
        SECONDS.observe(time.time() - begin)


async def _run(
    workflow: type[Workflow],
    task: Task,
    limit_seconds: float,
    tools: Toolbox,
    aside: Callable[[], AbstractAsyncContextManager[None]],
    journal: TaskJournal | None,
) -> tuple[list[Experience], float]:
    """Run the workflow, again if weights were withdrawn or a provider was lost. Returns its experiences and the seconds
    that the last run took of its limit.

    Episodes with a journal continue after the loss of a provider. The limit of each run begins with its first episode
    slot. Waiting for a provider that is away has no limit and is not counted.
    """
    left = _SAMPLED_AGAIN
    while True:
        try:
            async with asyncio.timeout(limit_seconds) as limit:
                kept = journal.run() if journal is not None else nullcontext()
                slots = episode_slots.attempt(limit, limit_seconds)
                with slots as played, seeds.attempt(task.task_id), kept:
                    experiences = await contained(_rollouts(workflow, task, tools))
                    seconds = played.seconds_taken()
            _refuse_older_after_newer(experiences)
            return experiences, seconds
        except TimeoutError:
            if limit.expired():
                raise _LimitReached from None
            raise  # by the workflow
        except WeightsWithdrawn as error:
            problem: WeightsWithdrawn | EnvironmentFailed = error
            counts = True
            if journal is not None:
                journal.forget()
        except EnvironmentFailed as error:
            if error.cause is not EnvironmentCause.AWAY:
                raise
            problem, counts = error, error.begun
        if counts and not left:
            raise problem
        left -= counts
        log.info("explorer.attempt.sampled_again", task=task.task_id, reason=str(problem))
        if isinstance(problem, EnvironmentFailed):
            async with aside():
                await tools.until_served(problem)


async def _rollouts(workflow: type[Workflow], task: Task, tools: Toolbox) -> list[Experience]:
    """Sample the group. The greedy baseline is one more run of the workflow, with the metric `greedy`."""
    if not task.greedy_baseline:
        return await workflow(task, tools).run()
    others = task.repeat_times - 1
    parts = (
        replace(task, repeat_times=others, sampling=replace(task.sampling, n=others)),
        replace(task, repeat_times=1, sampling=replace(task.sampling, n=1, temperature=0.0)),
    )
    sampled, greedy = await gather_rollouts(workflow(part, tools).run() for part in parts)
    first = max((others, *(e.rollout + 1 for e in sampled)))  # a game has several: one for each seat
    return sampled + [replace(e, rollout=first + e.rollout, metrics={**e.metrics, "greedy": 1.0}) for e in greedy]


def _refuse_older_after_newer(experiences: Sequence[Experience]) -> None:
    """Raises WeightsWithdrawn for a conversation across a rollback, since its first weights were withdrawn."""
    for experience in experiences:
        versions = [span.version for span in experience.version_spans]
        for before, after in pairwise(versions):
            if after < before:
                raise WeightsWithdrawn(f"tokens were sampled by version {before}, which a rollback withdrew")


def _failure(
    task: Task, attempt: int, explorer_id: str, cause: FailureCause, error: Exception, final: bool = False
) -> AttemptFailure:
    FAILURES.labels(cause).inc()
    text = f"{type(error).__name__}: {text_of(error)}"
    log.warning("explorer.attempt.failed", task=task.task_id, attempt=attempt, cause=str(cause), error=text)
    return AttemptFailure(task, attempt, explorer_id, cause, text, final, time.time())


async def store(
    broker: Broker, names: RunNames, outcome: Outcome, on_wait: Callable[[bool], None] = lambda _: None
) -> Receipt:
    """Store an outcome in its log. Waits for room without limit, and reports the wait by `on_wait`."""
    task, data = outcome.task, encode_outcome(outcome)
    held = False

    def hold(reason: str) -> None:
        nonlocal held
        if not held:
            log.warning("explorer.log.waiting", task=task.task_id, reason=reason)
        held = True
        on_wait(True)

    if len(data) > blobs.LARGEST_BYTES and isinstance(outcome, Group):
        error = InvalidInput("group", f"has {len(data)} bytes; a batch takes groups of up to {blobs.LARGEST_BYTES}")
        outcome = _failure(
            task, outcome.attempt, outcome.explorer_id, FailureCause.INVALID_EXPERIENCE, error, final=True
        )
        data = encode_outcome(outcome)
    too_long = len(data) > broker.client.max_payload - _HEADROOM_BYTES
    owner, message_id = owner_of(outcome.explorer_id), new_message_id()
    if too_long:
        reference = await _until_stored(lambda: blobs.store(broker, names, owner, data, hold, message_id), hold)
        data = encode_reference(reference)
    subject, checksum = _subject(names, owner, outcome, too_long), zlib.crc32(data)
    header = tracing.inject({headers.CRC32: str(checksum), headers.ORDINAL: str(task.ordinal)})
    options: dict[str, Any] = {"message_id": message_id, "headers": header, "on_refused": hold}
    stored = await _until_stored(lambda: broker.publish(subject, data, **options), hold)
    on_wait(False)
    if isinstance(outcome, Group):
        GROUPS.labels(task.kind).inc()
        if any(experience.truncation is Truncation.PROMPT for experience in outcome.experiences):
            PROMPTS_CUT.labels(task.kind).inc()
    return Receipt(stored.sequence, checksum, stored.duplicate)


async def _until_stored(put: Callable[[], Awaitable[_Stored]], hold: Callable[[str], None]) -> _Stored:
    """Retry while the stream is full or the broker is away."""
    while True:
        try:
            return await put()
        except (PublishRefused, Unavailable) as error:
            hold(str(error))


def _subject(names: RunNames, owner: str, outcome: Outcome, blob: bool) -> str:
    if outcome.task.kind is TaskKind.EVALUATION:
        return names.evaluation(owner, outcome.task.taskset)
    if isinstance(outcome, Group):
        return names.experience(owner, outcome.versions[0], outcome.task.taskset, blob=blob)
    return names.failure(owner, outcome.task.taskset)
