"""The judge of the experience log and the maker of batches. A pure state machine: same log, same batches.

Every task has an ordinal, counted from 1 in the order of feeding. A log entry ends its task (a group, or a final
failure), reports a failed attempt, or comes too late. Batches take stored groups in the order of their ordinals and
skip dead ones, so a batch waits for its slowest task and staleness stays within its bound: nothing is dropped by age,
and nothing by length. `consumed_ordinal` is the watermark: everything up to it has ended and was used.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True)
class StoredGroup:
    """What the ledger needs to know of a group in the log. Versions are the oldest and newest that sampled a token."""

    log_sequence: int
    task_id: str
    ordinal: int
    num_experiences: int
    oldest_version: int
    newest_version: int
    num_response_tokens: int
    reward_mean: float


class Verdict(StrEnum):
    """What a log entry meant. Also the metric key."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    RETRIED = "retried"
    DEAD = "dead"
    LATE_FAILURE = "late_failure"


@dataclass
class Window:
    """State after the log entries up to `log_sequence`."""

    groups_per_step: int
    log_sequence: int = 0
    consumed_ordinal: int = 0
    stored: int = 0
    dead_letters: int = 0
    duplicates_dropped: int = 0
    failed_attempts: int = 0
    response_tokens: int = 0
    pending: dict[int, StoredGroup] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    failures: dict[int, int] = field(default_factory=dict)
    # Dead tasks that may still lie in the queue; found again by their late failures, so not part of the cursor.
    unqueued: set[int] = field(default_factory=set)

    def has_ended(self, ordinal: int) -> bool:
        return ordinal <= self.consumed_ordinal or ordinal in self.pending or ordinal in self.dead

    def group(self, group: StoredGroup) -> Verdict:
        """Judge a group."""
        self._advance(group.log_sequence)
        if self.has_ended(group.ordinal):
            self.duplicates_dropped += 1
            return Verdict.DUPLICATE
        self.pending[group.ordinal] = group
        self.failures.pop(group.ordinal, None)
        self.stored += 1
        self.response_tokens += group.num_response_tokens
        return Verdict.STORED

    def failure(self, log_sequence: int, ordinal: int, max_attempts: int, final: bool = False) -> Verdict:
        """Judge a failed attempt. The task is dead after `max_attempts` of them, or at a final one."""
        self._advance(log_sequence)
        if self.has_ended(ordinal):
            if ordinal in self.dead or ordinal <= self.consumed_ordinal:
                self.unqueued.add(ordinal)
            return Verdict.LATE_FAILURE
        self.failed_attempts += 1
        failures = self.failures.pop(ordinal, 0) + 1
        if not final and failures < max_attempts:
            self.failures[ordinal] = failures
            return Verdict.RETRIED
        self.dead.add(ordinal)
        self.unqueued.add(ordinal)
        self.dead_letters += 1
        return Verdict.DEAD

    def skip(self, log_sequence: int) -> None:
        """Pass over an entry that names no task."""
        self._advance(log_sequence)

    def _advance(self, log_sequence: int) -> None:
        if log_sequence <= self.log_sequence:
            raise ValueError(f"log entry {log_sequence} comes after {self.log_sequence}")
        self.log_sequence = log_sequence

    def next_batch(self) -> list[StoredGroup] | None:
        """The next step's groups, and move the watermark past them; None while one of them is missing."""
        batch: list[StoredGroup] = []
        ordinal = self.consumed_ordinal
        while len(batch) < self.groups_per_step:
            ordinal += 1
            if ordinal in self.dead:
                continue
            if ordinal not in self.pending:
                return None
            batch.append(self.pending[ordinal])
        for group in batch:
            del self.pending[group.ordinal]
        self.dead -= {dead for dead in self.dead if dead <= ordinal}
        self.consumed_ordinal = ordinal
        return batch

    def missing(self) -> list[int]:
        """Ordinals the next batch waits for, fed or not."""
        missing: list[int] = []
        have, ordinal = 0, self.consumed_ordinal
        while have + len(missing) < self.groups_per_step:
            ordinal += 1
            if ordinal in self.pending:
                have += 1
            elif ordinal not in self.dead:
                missing.append(ordinal)
        return missing

    def lowest_needed_sequence(self) -> int:
        """Log entries below this one are of no use to any later batch."""
        return min((group.log_sequence for group in self.pending.values()), default=self.log_sequence + 1)

    def restore(self, pending: Iterable[StoredGroup], dead: Iterable[int], failures: Mapping[int, int]) -> "Window":
        """Fill in what lies above the watermark."""
        self.pending = {group.ordinal: group for group in pending}
        self.dead = set(dead)
        self.failures = dict(failures)
        return self
