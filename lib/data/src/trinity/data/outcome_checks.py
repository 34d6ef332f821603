"""Checks of an outcome's header and rollouts, for domain types and messages. Experience.check has its fields."""

from collections.abc import Iterable
from typing import Protocol

from trinity.runtime.errors import InvalidInput

ROLLOUTS_PER_REPEAT = 2
LONGEST_NAME = 256
LATEST_SECONDS = 1e11  # Unix time of the year 5138


class Numbered(Protocol):
    """An Experience or its message."""

    @property
    def rollout(self) -> int: ...

    @property
    def step(self) -> int: ...


class Attempted(Protocol):
    """A Group, an AttemptFailure, or their messages."""

    @property
    def attempt(self) -> int: ...

    @property
    def explorer_id(self) -> str: ...


class Timed(Attempted, Protocol):
    """A Group or its message."""

    @property
    def started_at_seconds(self) -> float: ...

    @property
    def finished_at_seconds(self) -> float: ...


def check_rollouts(repeat_times: int, experiences: Iterable[Numbered]) -> None:
    """Raise InvalidInput for more than twice the task's rollouts, or for a step that occurs twice.

    A workflow may fail to make all rollouts, or add an experience to each: R3L keeps the first of two attempts.
    """
    most = ROLLOUTS_PER_REPEAT * repeat_times
    seen = set()
    for index, experience in enumerate(experiences):
        if experience.rollout >= most:
            problem = f"is {experience.rollout}; a task with repeat_times {repeat_times} has at most {most} rollouts"
            raise InvalidInput(f"group.experiences[{index}].rollout", problem)
        if (key := (experience.rollout, experience.step)) in seen:
            raise InvalidInput(f"group.experiences[{index}].step", f"{key[1]} of rollout {key[0]} is there twice")
        seen.add(key)


def check_attempt(name: str, outcome: Attempted) -> None:
    """Raise InvalidInput unless attempt and explorer are given."""
    if outcome.attempt < 1:
        raise InvalidInput(f"{name}.attempt", f"is {outcome.attempt}, must be >= 1")
    if not 1 <= len(outcome.explorer_id) <= LONGEST_NAME:
        problem = f"has {len(outcome.explorer_id)} characters, must have 1 to {LONGEST_NAME}"
        raise InvalidInput(f"{name}.explorer_id", problem)


def check_header(group: Timed) -> None:
    """Raise InvalidInput naming the first wrong field of the group, experiences excluded."""
    check_attempt("group", group)
    for name in ("started_at_seconds", "finished_at_seconds"):
        if not 0 <= getattr(group, name) <= LATEST_SECONDS:
            raise InvalidInput(f"group.{name}", f"is {getattr(group, name)}, must be Unix time")
