"""A fork continues from a step of its parent run: what the parent gives, and how the new buffer begins with it.

`trinity fork` writes the parts into <job>/fork/parts.bin. The new run gets the ledger entries up to the
step, with the parent's sequence numbers. Its log continues behind these numbers: first groups that waited for a batch,
then groups that the parent stored later, sampled by no newer weights than the step's. The buffer feeds later tasks
again, in the same order.

A regrade is such a run that also has the parent's later groups, whichever weights sampled them, with rewards that
`trinity regrade` has replaced.
"""

import hashlib
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from trinity.buffer.ledger.entries import Ledger
from trinity.buffer.ledger.wire import BatchGroup, Entry, Part, cursor_of, decode_part, window_at
from trinity.buffer.log.reader import LogReader, judged
from trinity.buffer.log.wire import LogEntry
from trinity.buffer.operators.pipeline import Pipeline
from trinity.buffer.state.context import Origin, RunContext
from trinity.buffer.window.groups import CUT, EVICTED, FENCED, STALE, StoredGroup
from trinity.buffer.window.policy import policy_of
from trinity.buffer.window.window import Window
from trinity.config import Plan
from trinity.config.parents import FORK, ForkDamaged, Parent
from trinity.data.experience import UNLIMITED, Limits
from trinity.data.task_source import TaskMixture
from trinity.data.wire import encode_reference
from trinity.runtime import headers
from trinity.runtime.broker import blobs
from trinity.runtime.names import owner_of

log = structlog.get_logger(__name__)

_HEADROOM_BYTES = 16_384  # of NATS's message limit, for headers
# Reasons that the new run judges by itself; a group of a cut task has not counted.
_JUDGED_AGAIN = (STALE, EVICTED, FENCED)


async def parts_after(
    plan: Plan, ledger: Ledger, reader: LogReader, step: int, through_step: int = 0
) -> AsyncIterator[Part]:
    """Yields what a run that goes on after `step` needs, as the Fork call promises."""
    last = await ledger.get(step)
    cursor = await ledger.cursor_of(last)
    for earlier in range(1, step):
        yield replace(await ledger.get(earlier), cursor=b"", cursor_sequence=0)
    yield replace(last, cursor=cursor, cursor_sequence=0)
    if plan.offline:
        return
    window = window_at(cursor, policy_of(plan))
    waiting = [*window.unused.values(), *window.reusable.values()]
    wanted = {group.log_sequence: group.ordinal for group in waiting}
    # The fork gets these groups whatever weights sampled them: groups that wait, and groups that are regraded.
    given = set(wanted)
    for later in range(step + 1, min(ledger.newest_step, max(plan.staleness.open_batches(step), through_step)) + 1):
        entry = await ledger.get(later)
        yield replace(entry, cursor=b"", cursor_sequence=0)
        is_used = later <= through_step
        fresh = [(g.log_sequence, g.ordinal) for g in entry.groups if is_used or g.newest_version <= step]
        drops = [drop for drop in entry.dropped if drop.reason != CUT]
        if is_used:
            given.update(sequence for sequence, _ in fresh)
            given.update(drop.log_sequence for drop in drops if drop.reason != FENCED)
        fresh += [(drop.log_sequence, drop.ordinal) for drop in drops]
        wanted |= {sequence: ordinal for sequence, ordinal in fresh if sequence > window.log_sequence}
    for sequence in sorted(wanted):
        outcome, traceparent = await reader.payload(sequence)
        if sequence in given or _summary(outcome, sequence).newest_version <= step:
            yield BatchGroup(outcome, wanted[sequence], traceparent)


def _summary(outcome: bytes, sequence: int) -> StoredGroup:
    return LogEntry.parse(outcome).unchecked_summary(sequence)


def read_parts(path: Path) -> Iterator[Entry | BatchGroup]:
    """Yields the parts of a file: each has its length before it, in four bytes. Raises ForkDamaged for others."""
    with path.open("rb") as file:
        while head := file.read(4):
            data = file.read(int.from_bytes(head, "little"))
            try:
                part = decode_part(data)
            except DecodeError:
                part = None
            if part is None or len(data) != int.from_bytes(head, "little"):
                raise ForkDamaged(f"{path} is damaged; remove the job folder, and fork the parent again")
            yield part


class _Regrading:
    """Validates regraded groups like groups of explorers: fields, rewards, operators."""

    def __init__(self, plan: Plan, step: int, limits: Limits) -> None:
        self._pipeline = Pipeline(plan.config.data_processor.experience_pipeline.operators)
        self._step, self._limits = step, limits

    def judged(self, part: BatchGroup, known: StoredGroup) -> tuple[StoredGroup, str]:
        """Returns the group as it may enter a batch, and why it does not or "". Raises InvalidInput."""
        entry = LogEntry.parse(part.outcome)
        found = entry.summary(known.log_sequence, self._limits)
        group = replace(
            found,
            oldest_version=min(known.oldest_version, self._step),  # a payload may have versions of an older line
            newest_version=min(known.newest_version, self._step),
            parent_steps=known.parent_steps + max(0, known.newest_version - self._step),
            parent_sha256=part.parent_sha256,
        )
        if part.left_out or not self._pipeline.names:
            return group, part.left_out
        return judged(group, self._pipeline.run(entry.group()), self._limits)


def _of_run(part: Entry | BatchGroup, run: str) -> Entry | BatchGroup:
    if isinstance(part, Entry):
        return replace(part, run=run)
    return replace(part, outcome=LogEntry.parse(part.outcome).of_run(run))


@dataclass(frozen=True)
class Beginning:
    """The state in which a fork begins. `groups` of its log, in order; `first`: sequence of the first of them."""

    entries: Sequence[Entry]
    groups: Sequence[BatchGroup]
    first: int
    window: Window

    @classmethod
    def of(cls, path: Path, step: int, plan: Plan, run: str, limits: Limits = UNLIMITED) -> "Beginning":
        """Reads the parts that the parent gave for `step`, as those of the new run.

        Raises InvalidInput for a regraded group that may not enter a log with these limits.
        """
        regrading = _Regrading(plan, step, limits)
        parts = [_of_run(part, run) for part in read_parts(path)]
        entries = [part for part in parts if isinstance(part, Entry)]
        given = {part.ordinal: part for part in parts if isinstance(part, BatchGroup)}
        shared, later = entries[:step], entries[step:]
        if [entry.step for entry in entries] != list(range(1, len(entries) + 1)) or len(shared) < step:
            raise ForkDamaged(
                f"{path} lacks an entry up to step {step}; remove the job folder, and fork the parent again"
            )
        window = window_at(shared[-1].cursor, policy_of(plan))
        first = window.log_sequence + 1
        waiting = sorted((*window.unused.values(), *window.reusable.values()), key=lambda group: group.log_sequence)
        if missing := [group.task_id for group in waiting if group.ordinal not in given]:
            raise ForkDamaged(f"{path} lacks the group of task {missing[0]}; remove the job folder, and fork again")
        at = {group.ordinal: first + index for index, group in enumerate(waiting)}
        for pool in (window.unused, window.reusable):
            for o, group in list(pool.items()):
                digest = hashlib.sha256(given[o].outcome).digest()
                pool[o], reason = replace(group, log_sequence=at[o], outcome_sha256=digest), ""
                if given[o].parent_sha256:
                    pool[o], reason = regrading.judged(given[o], pool[o])
                if reason:
                    window.drop(pool[o], reason)
        window.log_sequence += len(waiting)
        window.requeued = dict.fromkeys(window.requeued, 0)  # those not fed yet are the parent's
        groups = [given[group.ordinal] for group in waiting]
        known = {group.ordinal: group for entry in later for group in entry.groups}
        reasons = {drop.ordinal: drop.reason for entry in later for drop in entry.dropped}
        for part in given.values():
            if part.ordinal in at or window.has_ended(part.ordinal):
                continue
            sequence = window.log_sequence + 1
            reason = reasons.get(part.ordinal, "")
            fresh = _summary(part.outcome, sequence)
            summary = replace(
                known.get(part.ordinal) or fresh,
                log_sequence=sequence, use_count=0, staleness_steps=0, reusable_at=0.0,
                outcome_sha256=fresh.outcome_sha256,
            )  # fmt: skip
            reason = "" if reason in _JUDGED_AGAIN else reason
            if part.parent_sha256:
                summary, reason = regrading.judged(part, summary)
            window.group(summary, reason)
            groups.append(part)
        return cls(shared, groups, first, window)

    @property
    def fed(self) -> int:
        """Tasks that count as fed. Those among them that have not ended are fed again."""
        return max(self.window.ended, default=self.window.ended_through)

    def position(self, tasks: TaskMixture) -> int:
        """How far the tasksets were read for the tasks up to `fed`: requeued and callers' tasks are not read there.

        The newest tasks tell how many of these there were, as far as the tasksets have the same names and sizes.
        """
        ids = {group.task_id for entry in self.entries for group in entry.groups}
        ids |= {task.task_id for entry in self.entries for task in entry.cut if task.task_id}
        ids |= {drop.task_id for entry in self.entries for drop in entry.dropped if drop.task_id}
        others = len(self.window.requeued) + sum(not tasks.has_made(task_id) for task_id in ids)
        newest = [*self.entries[-1].groups, *self.window.unused.values()]
        found = [passed for group in newest if (passed := _passed(tasks, group, others)) is not None]
        return max(0, self.fed - min(found, default=others))


def _passed(tasks: TaskMixture, group: StoredGroup, most: int) -> int | None:
    """Returns how many tasks of others came before a group's task; None if the tasksets have not got it there."""
    known = range(min(most, group.ordinal - 1) + 1)
    return next((passed for passed in known if tasks.is_at(group.ordinal - 1 - passed, group.task_id)), None)


async def begin(context: RunContext, ledger: Ledger, tasks: TaskMixture | None, parent: Parent) -> Origin:
    """Writes log and ledger of a fork, whose ledger ends before its step. May be repeated after a crash."""
    plan, broker, names, step = context.plan, context.broker, context.names, parent.step
    path = plan.job_dir / "fork" / "parts.bin"
    if not path.exists() or (parent.parts and hashlib.sha256(path.read_bytes()).hexdigest() != parent.parts):
        raise ForkDamaged(f"{path} is missing, or not as {FORK} says; remove the job folder, and fork the parent again")
    if tasks is None:
        for entry in [part for part in read_parts(path) if isinstance(part, Entry)][ledger.newest_step : step]:
            await ledger.append(replace(entry, run=context.run))
        return Origin(step)
    start = Beginning.of(path, step, plan, context.run, context.limits)
    if (await broker.state(names.experiences_stream)).last_sequence < start.first - 1:
        await broker.purge_below(names.experiences_stream, start.first)  # the log goes on behind the parent's numbers
    for sequence, group in enumerate(start.groups, start.first):
        if (await broker.state(names.experiences_stream)).last_sequence < sequence:
            await _store(context, group, sequence)
    origin = Origin(step, start.fed, start.position(tasks))
    if (await broker.state(names.tasks_stream)).last_sequence < origin.fed:
        await broker.purge_below(names.tasks_stream, origin.fed + 1)  # a task's sequence is its ordinal or higher
    for entry in start.entries[ledger.newest_step :]:
        if entry.step == step:
            entry = replace(entry, cursor=cursor_of(start.window), floor_sequence=start.window.floor())
        await ledger.append(entry)
    log.info("buffer.fork.begun", step=step, groups=len(start.groups), fed=origin.fed, position=origin.position)
    return origin


async def _store(context: RunContext, group: BatchGroup, sequence: int) -> None:
    """Stores a group of the parent's at a sequence of the log, under its explorer's subject."""
    entry = LogEntry.parse(group.outcome)
    data, owner = group.outcome, owner_of(entry.explorer_id)
    oldest = entry.unchecked_summary(sequence).oldest_version
    is_long = len(data) > context.broker.most_bytes - _HEADROOM_BYTES
    if is_long:
        data = encode_reference(await blobs.store(context.broker, context.names, owner, data))
    marks = {headers.CRC32: str(zlib.crc32(data)), headers.ORDINAL: str(group.ordinal)}
    if group.traceparent:
        marks[headers.TRACEPARENT] = group.traceparent
    await context.broker.append(
        context.names.experience(owner, oldest, entry.task.fields.taskset, blob=is_long),
        context.names.experiences_stream,
        data,
        message_id=f"fork/{group.ordinal}",
        last_sequence=sequence - 1,
        headers=marks,
    )
