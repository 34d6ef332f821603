"""The interface of experience operators: their input, and the changes that they may make."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trinity.data.experience import Experience, Task
from trinity.runtime.errors import InvalidInput

MOST_DRAFTS = 65_536  # of a group; the ledger entry has each that an operator changes or adds


@dataclass(eq=False)
class Draft:
    """One experience on its way into a batch. Operators change reward, masked and metrics, or drop it.

    `experience` is as it was stored and stays so; `index` is its place in the group. Two drafts may have one index: the
    second repeats the first's experience.
    """

    experience: Experience
    index: int
    reward: float
    masked: bool = False  # no token enters the loss; the reward still counts in the group's advantage
    dropped_by: str = ""  # the operator's name once it is left out
    metrics: dict[str, float] = field(default_factory=dict)  # the experience's, and what operators add

    def __post_init__(self) -> None:
        self.metrics = {**self.experience.metrics, **self.metrics}

    def drop(self) -> None:
        """Leave it out of every batch. The pipeline replaces the text by the operator's name."""
        self.dropped_by = self.dropped_by or "operator"

    def metric(self, name: str) -> float:
        """Raises InvalidInput for a metric that it does not have."""
        if name not in self.metrics:
            known = ", ".join(sorted(self.metrics)) or "none"
            raise InvalidInput(f"metrics.{name}", f"is missing in experience {self.index}, which has: {known}")
        return self.metrics[name]


class Operator(Protocol):
    """An attribute `drops`, if any, tells users why it drops groups."""

    def __call__(self, drafts: list[Draft], task: Task) -> dict[str, float] | None:
        """Changes the drafts of one group in place and returns the group's metrics.

        `drafts` are those still in, at least one, in the order of their indices. A draft removed from the list is
        dropped; a draft added to it repeats an experience of the group. At most MOST_DRAFTS may be left.
        """


@dataclass(frozen=True)
class Rollout:
    """The drafts of one rollout, in the order of steps."""

    drafts: tuple[Draft, ...]

    @property
    def last(self) -> Draft:
        return self.drafts[-1]

    @property
    def reward(self) -> float:
        """That of the last step, where environments give their verdict and multi-step GRPO takes its score."""
        return self.last.reward


def rollouts(drafts: Sequence[Draft]) -> list[Rollout]:
    """The group's rollouts, in order. With one step each, one draft each."""
    found: dict[int, list[Draft]] = {}
    for draft in drafts:
        found.setdefault(draft.experience.rollout, []).append(draft)
    return [Rollout(tuple(sorted(steps, key=lambda draft: draft.experience.step))) for steps in found.values()]


def check_number(drafts: int) -> None:
    """Raises InvalidInput for more drafts than an operator may leave."""
    if drafts > MOST_DRAFTS:
        problem = f"would be {drafts}, may be {MOST_DRAFTS} in a group; repeat fewer, or lower workflow_args.max_turns"
        raise InvalidInput("drafts", problem)


def drop_all(drafts: Sequence[Draft]) -> None:
    for draft in drafts:
        draft.drop()
