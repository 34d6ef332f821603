"""Stored groups as the window and the ledger know them, and their age in optimizer steps."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from trinity.weights.pointer import Live

# Reasons why a stored group enters no batch, besides the names of operators.
STALE, FENCED, EVICTED, CUT = "stale", "fenced", "evicted", "cut"
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Lineage:
    """Computes the age of experience when weights were withdrawn or rejected meanwhile.

    A version's number is its optimizer step, so the steps between two versions are the difference of their numbers.
    After a rollback the trainer continues from older weights and keeps counting steps: the withdrawn steps are not in
    its weights. `withdrawn`: disjoint ranges (after, up to and including) of these steps, in order.

    `rejected`: steps that the LIVE version lacks because every newer version was rejected.
    """

    withdrawn: Ranges = ()
    rejected: int = 0

    @classmethod
    def of(cls, live: Live) -> "Lineage":
        """The lineage in the pointer of the LIVE version."""
        ancestors = cls(_joined(live.withdrawn))
        return cls(ancestors.withdrawn, ancestors.steps(live.step, live.gate_step) if live.step >= 0 else 0)

    def steps(self, version: int, until: int) -> int:
        """Steps that the weights of step `until` learnt and those of `version` did not; at least 0."""
        passed = sum(max(0, min(newest, until) - max(after, version)) for after, newest in self.withdrawn)
        return max(0, until - version - passed)


NOTHING_WITHDRAWN = Lineage()


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Merges overlapping ranges."""
    found: list[tuple[int, int]] = []
    for after, newest in sorted(ranges):
        if found and after <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], newest)
        else:
            found.append((after, newest))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Kept:
    """An experience of a group as operators left it. `masked`: none of its tokens enters the loss."""

    index: int
    reward: float
    masked: bool = False


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group of the log as the ledger knows it. Versions are the oldest and newest that sampled a token.

    `kept` is empty if all experiences are trained as they were stored; `reusable_at` is Unix time.
    """

    log_sequence: int
    task_id: str
    ordinal: int
    num_experiences: int
    oldest_version: int
    newest_version: int
    num_response_tokens: int
    reward_mean: float
    num_sampled_tokens: int = 0
    prompt_cut: bool = False  # it was longer than model.max_prompt_tokens
    moved_episodes: int = 0  # that another explorer continued
    kept: tuple[Kept, ...] = ()
    use_count: int = 0
    reusable_at: float = 0.0
    staleness_steps: int = 0  # at the step that trains it; 0 before
    outcome_sha256: bytes = b""  # of its payload
    parent_steps: int = 0  # of a regraded group: steps of the parent's line after the shared one, before it was sampled
    parent_sha256: bytes = b""  # of the payload that the parent has, with other rewards

    def staleness(self, step: int, lineage: Lineage = NOTHING_WITHDRAWN) -> int:
        """Optimizer steps between the weights that sampled the oldest token and the weights that `step` updates.

        A version's number is its optimizer step; step k updates the weights of step k - 1. A regraded group counts
        the steps of both lines since their shared step.
        """
        return lineage.steps(self.oldest_version, step - 1) + self.parent_steps

    def sampled_by(self, versions: Collection[int]) -> bool:
        if self.newest_version - self.oldest_version < len(versions):
            return any(version in versions for version in range(self.oldest_version, self.newest_version + 1))
        return any(self.oldest_version <= version <= self.newest_version for version in versions)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that enters no batch. `task_id` is empty for CUT: the entry that cut the task names it."""

    ordinal: int
    log_sequence: int
    reason: str
    num_response_tokens: int
    task_id: str = ""
