"""Checks of an outcome's header and rollouts, for domain types and messages. Experience.check has its fields."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from trinity.runtime.errors import InvalidInput

ROLLOUTS_PER_REPEAT = 8  # a game has at most that many players
LONGEST_NAME = 256
LATEST_SECONDS = 1e11  # Unix time of the year 5138
# Probability of at least 0.999. Far from what rounding in other batches changes of two tokens together.
_CERTAIN = np.log(0.999)


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
    """Raise InvalidInput for more than eight times the task's rollouts, or for a step that occurs twice.

    A workflow may fail to make all rollouts, or give several experiences for each: one of each player of a game.
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


# Below these, rounding in another batch can make certain of one token what was certain of another.
_LEAST_TEMPERATURE, _LEAST_TOP_P = 0.1, 0.6


class Spread(Protocol):
    """SamplingParams or its message."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_p(self) -> float: ...

    @property
    def top_k(self) -> int: ...


class Sampled(NamedTuple):
    """The tokens of an experience: int32 [P + R], P, float32 [R], bool [R], and version and end of the first span."""

    token_ids: np.ndarray
    prompt_length: int
    logprobs: np.ndarray
    action_mask: np.ndarray
    version: int
    version_end: int


def check_certainties(sampling: Spread, group: Sequence[Sampled]) -> None:
    """Raise InvalidInput if two rollouts sampled different tokens after the same ones, both with a probability of 1.

    A log-probability of 0 is real where the model is certain (0.0 in float32 from 1 - 6e-8 on), for a token or for all.
    Two such tokens in one place are not: their probabilities add up to more than 1. Sampling that leaves one token, as
    top_k 1 does, makes any token certain, so that nothing is checked.
    """
    if sampling.temperature < _LEAST_TEMPERATURE or sampling.top_p < _LEAST_TOP_P or sampling.top_k == 1:
        return
    order = sorted(range(len(group)), key=lambda index: (group[index].prompt_length, group[index].token_ids.tobytes()))
    for before, after in pairwise(order):  # neighbours have the longest common beginnings
        one, other = group[before], group[after]
        length = min(len(one.token_ids), len(other.token_ids))
        differs = np.flatnonzero(one.token_ids[:length] != other.token_ids[:length])
        if not len(differs) or one.prompt_length != other.prompt_length or one.version != other.version:
            continue
        at = int(differs[0]) - one.prompt_length
        if not 0 <= at < min(one.version_end, other.version_end) or not (one.action_mask[at] and other.action_mask[at]):
            continue
        if min(one.logprobs[at], other.logprobs[at]) > _CERTAIN:
            raise InvalidInput(
                f"group.experiences[{after}].logprobs",
                f"has {float(other.logprobs[at]):g} for token {at}, and experiences[{before}] has "
                f"{float(one.logprobs[at]):g} for another token after the same ones; both cannot be certain, so these "
                "are not the log-probabilities of the sampled tokens",
            )


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
