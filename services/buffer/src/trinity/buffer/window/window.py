"""Judges the entries of the experience log and chooses the groups of the next batch. Pure: same log, same batches.

Every task has an ordinal, counted from 1 in the order of feeding. A log entry ends its task (a group, or a final
failure), reports a failed attempt, comes too late, or is the buffer's own (a dead task is fed again under a new
ordinal, versions are withdrawn). A stored group waits in the pool until a batch takes it or it is dropped with a
reason. A batch that does not wait for a task ends it: the task is cut. `ended_through` is the watermark: every task
up to it has ended.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice

from trinity.buffer.window.groups import CUT, EVICTED, FENCED, NOTHING_WITHDRAWN, STALE, Dropped, Lineage, StoredGroup
from trinity.buffer.window.policy import Candidate, Policy

_MOST_CUT = 1024  # whose groups are known to be late; those of older ones pass for duplicates


class Verdict(StrEnum):
    """The meaning of a log entry. Also the metric key."""

    STORED = "stored"
    DROPPED = "dropped"
    DUPLICATE = "duplicate"
    LATE = "late"
    RETRIED = "retried"
    DEAD = "dead"
    LATE_FAILURE = "late_failure"
    REFUSED = "refused"
    REQUEUED = "requeued"
    FENCED = "fenced"


@dataclass
class Window:
    """State after the log entries up to `log_sequence`."""

    policy: Policy
    log_sequence: int = 0
    ended_through: int = 0
    stored: int = 0
    dead_letters: int = 0
    duplicates_dropped: int = 0
    failed_attempts: int = 0
    sampled_tokens: int = 0
    prompts_cut: int = 0
    moved_episodes: int = 0
    refused: int = 0
    cut_tasks: int = 0
    late_groups: int = 0  # of cut tasks
    ended: set[int] = field(default_factory=set)  # above ended_through
    unused: dict[int, StoredGroup] = field(default_factory=dict)
    reusable: dict[int, StoredGroup] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    requeued: dict[int, int] = field(default_factory=dict)  # tasks fed under a new ordinal -> log sequence of that
    fenced: set[int] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)  # the newest of them, whose group has not come
    dropped: Counter[str] = field(default_factory=Counter)
    fresh_drops: list[Dropped] = field(default_factory=list)  # since the newest ledger entry
    # Not part of the cursor: the queue says how far requeues were fed, late failures find dead tasks in it again.
    requeued_through: int = 0  # log sequence of the newest requeue that was fed
    # Tasks that ended and may still lie in the queue: those that the newest ledger entry covers, and later ones. A
    # restart judges the entries of the latter again, by their tasks as they were fed.
    unqueued: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    # Unused groups that a batch may take, in its order. Follows from `unused`.
    _ready: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def lost(self) -> int:
        """Ordinals that bring no group into a batch; one more task is fed for each."""
        return self.dead_letters + len(self.requeued) + self.dropped.total()

    @property
    def num_ended(self) -> int:
        """Ordinals that have ended: with a stored group, cut, or with a dead task, requeued since or not."""
        return self.stored + self.cut_tasks + self.dead_letters + len(self.requeued)

    @property
    def to_requeue(self) -> list[int]:
        """Log sequences of the requeues that are not fed yet, the oldest first."""
        return sorted(sequence for sequence in self.requeued.values() if sequence > self.requeued_through)

    def has_ended(self, ordinal: int) -> bool:
        return ordinal <= self.ended_through or ordinal in self.ended

    def group(self, group: StoredGroup, dropped_by: str = "") -> Verdict:
        """Judge a group. `dropped_by` names the operator that keeps it out of every batch."""
        if self.has_ended(group.ordinal):
            return self.repeated(group.log_sequence, group.ordinal, group.num_response_tokens)
        self._advance(group.log_sequence)
        self.failures.pop(group.ordinal, None)
        self.stored += 1
        self.sampled_tokens += group.num_sampled_tokens
        self.prompts_cut += group.prompt_cut
        self.moved_episodes += group.moved_episodes
        reason = dropped_by or (FENCED if group.sampled_by(self.fenced) else "")
        if reason:
            self.drop(group, reason)
        else:
            self.unused[group.ordinal] = group
            if self.policy.kind != "fifo" or group.ordinal <= self.ended_through:
                self._ready[group.ordinal] = None
        self._end(group.ordinal)
        self._evict()
        return Verdict.DROPPED if reason else Verdict.STORED

    def repeated(self, log_sequence: int, ordinal: int, num_response_tokens: int) -> Verdict:
        """Judge a group of a task that has ended. Nobody checks it, so the ledger takes none of its texts."""
        self._advance(log_sequence)
        if ordinal not in self.cut:
            self.duplicates_dropped += 1
            return Verdict.DUPLICATE
        self.cut.discard(ordinal)
        self.leaving.add(ordinal)
        self.late_groups += 1
        self.fresh_drops.append(Dropped(ordinal, log_sequence, CUT, num_response_tokens))
        return Verdict.LATE

    def failure(self, log_sequence: int, ordinal: int, max_attempts: int, final: bool = False) -> Verdict:
        """Judge a failed attempt. The task is dead after `max_attempts` of them, or at a final one."""
        self._advance(log_sequence)
        if self.has_ended(ordinal):
            self.leaving.add(ordinal)
            return Verdict.LATE_FAILURE
        self.failed_attempts += 1
        failures = self.failures.pop(ordinal, 0) + 1
        if not final and failures < max_attempts:
            self.failures[ordinal] = failures
            return Verdict.RETRIED
        self.dead.add(ordinal)
        self.leaving.add(ordinal)
        self.dead_letters += 1
        self._end(ordinal)
        return Verdict.DEAD

    def requeue(self, log_sequence: int, ordinal: int) -> Verdict:
        """A dead task is fed again, as a new one: under the next ordinal, once the staleness bound allows it."""
        self._advance(log_sequence)
        if ordinal not in self.dead:
            return Verdict.DUPLICATE
        self.dead.discard(ordinal)
        self.dead_letters -= 1
        self.requeued[ordinal] = log_sequence
        return Verdict.REQUEUED

    def fence(self, log_sequence: int, versions: Iterable[int]) -> Verdict:
        """Withdraw weight versions: what they sampled enters no later batch."""
        self._advance(log_sequence)
        self.fenced.update(versions)
        for group in [g for g in self.unused.values() if g.sampled_by(self.fenced)]:
            self.drop(group, FENCED)
        for group in [g for g in self.reusable.values() if g.sampled_by(self.fenced)]:
            del self.reusable[group.ordinal]
        return Verdict.FENCED

    def skip(self, log_sequence: int) -> Verdict:
        """Pass over an entry that names no task of this run."""
        self._advance(log_sequence)
        self.refused += 1
        return Verdict.REFUSED

    def next_batch(
        self, step: int, now: float = 0.0, partial: bool = False, lineage: Lineage = NOTHING_WITHDRAWN
    ) -> list[StoredGroup] | None:
        """The groups of a step; None while there are too few. `partial`: all groups there are, at least one."""
        if self.policy.kind == "replay":
            return self._by_priority(step, now, partial)
        self._drop_refused(step, lineage)
        wanted = self.policy.groups_per_step
        choice = self.unused if partial else self._ready
        if len(choice) < (1 if partial else wanted):
            return None
        order = sorted(choice) if self.policy.kind == "fifo" else list(choice)
        return [self._take(ordinal) for ordinal in order[:wanted]]

    def next_tasks(self, fed: int) -> tuple[list[int], list[int]]:
        """Ordinals of the first P tasks that a batch may still take: tasks with a group, and tasks that have not ended.

        With fifo they are the next batch, once all have a group; fewer than P where fewer are fed.
        """
        tasks = list(islice(heapq.merge(sorted(self.unused), self.outstanding(fed)), self.policy.groups_per_step))
        return [o for o in tasks if o in self.unused], [o for o in tasks if o not in self.unused]

    def has_fewest(self, fed: int) -> bool:
        """Returns True if the next batch may go without some groups and has its minimum."""
        fewest = self.policy.fewest_groups
        return fewest is not None and len(self.next_tasks(fed)[0]) >= fewest

    def may_cut(self, fed: int) -> bool:
        """Returns True if has_fewest and all tasks of the batch are fed: no task is cut before."""
        return self.has_fewest(fed) and sum(map(len, self.next_tasks(fed))) == self.policy.groups_per_step

    def short_batch(self, fed: int) -> tuple[list[StoredGroup], list[int]]:
        """Takes the stored groups of the next tasks and cuts the others. Returns the groups and the cut ordinals."""
        there, missing = self.next_tasks(fed)
        groups = [self._take(ordinal) for ordinal in there]
        for ordinal in missing:
            self.failures.pop(ordinal, None)
            self.cut_tasks += 1
            self.cut.add(ordinal)
            self.leaving.add(ordinal)
            self._end(ordinal)
        self.cut.difference_update(sorted(self.cut)[:-_MOST_CUT])
        return groups, missing

    def covered(self) -> None:
        """A ledger entry has this state: every task that has ended may leave the queue."""
        self.unqueued |= self.leaving
        self.leaving.clear()

    def missing(self) -> int:
        """Groups the next batch still waits for."""
        have = len(self._ready) if self.policy.kind == "fifo" else len(self.unused)
        return max(0, self.policy.groups_per_step - have)

    def floor(self) -> int:
        """Log entries below this sequence are of no use to any later batch."""
        needed = [group.log_sequence for group in (*self.unused.values(), *self.reusable.values())]
        return min([self.log_sequence + 1, *needed, *self.to_requeue])

    def _advance(self, log_sequence: int) -> None:
        if log_sequence <= self.log_sequence:
            raise ValueError(f"log entry {log_sequence} comes after {self.log_sequence}")
        self.log_sequence = log_sequence

    def _end(self, ordinal: int) -> None:
        self.ended.add(ordinal)
        while self.ended_through + 1 in self.ended:
            self.ended_through += 1
            self.ended.discard(self.ended_through)
            if self.policy.kind == "fifo" and self.ended_through in self.unused:
                self._ready[self.ended_through] = None

    def _take(self, ordinal: int) -> StoredGroup:
        self._ready.pop(ordinal, None)
        group = self.unused.pop(ordinal)
        return replace(group, use_count=group.use_count + 1)

    def drop(self, group: StoredGroup, reason: str) -> None:
        """Takes a stored group out of the pool: it enters no batch."""
        self.unused.pop(group.ordinal, None)
        self._ready.pop(group.ordinal, None)
        self.dropped[reason] += 1
        tokens, task_id = group.num_response_tokens, group.task_id
        self.fresh_drops.append(Dropped(group.ordinal, group.log_sequence, reason, tokens, task_id))

    def _drop_refused(self, step: int, lineage: Lineage) -> None:
        """Drops the groups that the sample strategy refuses. Rejected steps do not count: the same would be sampled."""
        for group in list(self.unused.values()):
            steps = group.staleness(step, lineage) - lineage.rejected
            known = Candidate(steps, group.num_experiences, group.num_response_tokens, group.reward_mean)
            if not self.policy.keeps(known):
                self.drop(group, STALE)

    def _priority(self, group: StoredGroup) -> tuple[float, int]:
        """For sorting: the best comes first, of equal ones the task that was fed first."""
        return -self.policy.priority.of(group.newest_version, group.use_count, group.ordinal), group.ordinal

    def _by_priority(self, step: int, now: float, partial: bool) -> list[StoredGroup] | None:
        if self.stored - self.dropped.total() < self.policy.must_have_arrived(step) and not partial:
            return None
        rested = [group for group in self.reusable.values() if group.reusable_at <= now]
        candidates = [*self.unused.values(), *rested]
        if len(candidates) < self.policy.groups_per_step and not (partial and candidates):
            return None
        batch = []
        for group in heapq.nsmallest(self.policy.groups_per_step, candidates, key=self._priority):
            self._ready.pop(group.ordinal, None)
            self.unused.pop(group.ordinal, None)
            self.reusable.pop(group.ordinal, None)
            used = replace(group, use_count=group.use_count + 1)
            batch.append(used)
            cooldown = self.policy.reuse_cooldown_seconds
            if cooldown is not None and self.policy.priority.allows(used.use_count):
                self.reusable[group.ordinal] = replace(used, reusable_at=now + cooldown)
        return batch

    def _evict(self) -> None:
        """Keep replay within its capacity: the groups of the lowest priority go first."""
        if self.policy.kind != "replay":
            return
        while len(self.unused) + len(self.reusable) > self.policy.capacity:
            worst = max((*self.unused.values(), *self.reusable.values()), key=self._priority)
            if worst.ordinal in self.unused:
                self.drop(worst, EVICTED)
            else:
                del self.reusable[worst.ordinal]

    def restore(self, unused: Iterable[StoredGroup]) -> "Window":
        """Fill in the pool, in any order."""
        key = {"fifo": lambda g: g.ordinal}.get(self.policy.kind, lambda g: g.log_sequence)
        for group in sorted(unused, key=key):
            self.unused[group.ordinal] = group
            if self.policy.kind != "fifo" or group.ordinal <= self.ended_through:
                self._ready[group.ordinal] = None
        return self

    def outstanding(self, fed: int) -> Iterator[int]:
        """Ordinals of tasks that were fed and have not ended."""
        return (o for o in range(self.ended_through + 1, fed + 1) if o not in self.ended)
