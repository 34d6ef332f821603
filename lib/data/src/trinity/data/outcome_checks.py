"""What is checked of an outcome beside its experiences' own fields, of the domain's types and of messages alike."""

from collections.abc import Iterable
from typing import Protocol

from trinity.runtime.errors import InvalidInput

ROLLOUTS_PER_REPEAT = 2
LONGEST_NAME = 256
LATEST_SECONDS = 1e11  # Unix time of the year 5138


class Numbered(Protocol):
    """An Experience, or the message of one."""

    @property
    def rollout(self) -> int: ...

    @property
    def step(self) -> int: ...


class Attempted(Protocol):
    """A Group, an AttemptFailure, or the message of one."""

    @property
    def attempt(self) -> int: ...

    @property
    def explorer_id(self) -> str: ...


class Timed(Attempted, Protocol):
    """A Group, or the message of one."""

    @property
    def started_at_seconds(self) -> float: ...

    @property
    def finished_at_seconds(self) -> float: ...


def check_rollouts(repeat_times: int, experiences: Iterable[Numbered]) -> None:
    """Raise InvalidInput unless the rollouts are about as many as the task asks for, each of its steps once.

    A workflow may fail to make all of them, or add one experience to each: R3L keeps what led to a second attempt.
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
    """Raise InvalidInput unless the attempt and the explorer that made it can be told."""
    if outcome.attempt < 1:
        raise InvalidInput(f"{name}.attempt", f"is {outcome.attempt}, must be >= 1")
    if not 1 <= len(outcome.explorer_id) <= LONGEST_NAME:
        problem = f"has {len(outcome.explorer_id)} characters, must have 1 to {LONGEST_NAME}"
        raise InvalidInput(f"{name}.explorer_id", problem)


def check_header(group: Timed) -> None:
    """Raise InvalidInput naming a field of the group that is no experience's."""
    check_attempt("group", group)
    for name in ("started_at_seconds", "finished_at_seconds"):
        if not 0 <= getattr(group, name) <= LATEST_SECONDS:
            raise InvalidInput(f"group.{name}", f"is {getattr(group, name)}, must be Unix time")
