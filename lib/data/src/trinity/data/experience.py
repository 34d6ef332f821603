"""The domain types that all services share: tasks and their outcomes. Frozen; converted at the edges by `wire`.

Life of a task: fed by the buffer -> leased by an explorer -> ended as exactly one of a stored Group or a dead letter
(an AttemptFailure with `final`). Dimensions: P prompt tokens, R response tokens.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any, Protocol

import numpy as np

from trinity.runtime.errors import FailureCause, InvalidInput


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; see task.proto for ranges."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature >= 0, ">= 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= -1, ">= -1"),
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"in [0, max_tokens = {self.max_tokens}]"),
            ("n", self.n >= 1, ">= 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "> 0"),
        )
        for name, holds, rule in checks:
            if not holds:
                raise InvalidInput(f"sampling.{name}", f"is {getattr(self, name)}, must be {rule}")


class TaskKind(StrEnum):
    TRAIN = "train"
    EVALUATION = "evaluation"


@dataclass(frozen=True)
class Task:
    """One prompt or environment instance, explored `repeat_times` as one group.

    `greedy_baseline`: the last rollout is sampled at temperature 0, as the baseline of the others (ReMax).
    """

    run: str
    task_id: str
    ordinal: int
    kind: TaskKind
    taskset: str
    epoch: int
    row: int
    row_json: str
    format_json: str
    workflow: str
    workflow_args_json: str
    reward_function: str
    reward_args_json: str
    repeat_times: int
    sampling: SamplingParams
    gate_step: int
    evaluation_step: int
    timeout_seconds: float
    max_attempts: int
    life: int = 0
    greedy_baseline: bool = False

    @property
    def raw(self) -> dict[str, Any]:
        """The dataset row."""
        return _json_object(self.row_json, "task.row_json")

    @property
    def format(self) -> dict[str, Any]:
        """The taskset's `format` section."""
        return _json_object(self.format_json, "task.format_json")

    @property
    def workflow_args(self) -> dict[str, Any]:
        return _json_object(self.workflow_args_json, "task.workflow_args_json")


def _json_object(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidInput(name, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInput(name, f"must be a JSON object, is {type(value).__name__}")
    return value


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by weight version `version`."""

    version: int
    start: int
    end: int


class Truncation(IntEnum):
    NONE = 1
    PROMPT = 2
    RESPONSE = 3


@dataclass(frozen=True)
class Experience:
    """One trajectory (or one step of it) as it was sampled.

    token_ids int32 [P + R], logprobs float32 [R], action_mask bool [R]; reward in the environment's own unit.
    teacher_logprobs float32 [R], of the same tokens; None without a teacher.
    """

    rollout: int
    step: int
    token_ids: np.ndarray
    prompt_length: int
    logprobs: np.ndarray
    action_mask: np.ndarray
    reward: float
    version_spans: tuple[VersionSpan, ...]
    truncation: Truncation = Truncation.NONE
    metrics: dict[str, float] = field(default_factory=dict)
    info_json: str = ""
    prompt_text: str = ""
    response_text: str = ""
    teacher_logprobs: np.ndarray | None = None

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    def check(self, name: str) -> None:
        """Raise InvalidInput naming the first field of this experience that cannot be right (invariants I5, I8)."""
        length = self.response_length
        if not 1 <= self.prompt_length <= len(self.token_ids):
            problem = f"is {self.prompt_length}, must be in [1, {len(self.token_ids)}]"
            raise InvalidInput(f"{name}.prompt_length", problem)
        if len(self.token_ids) and int(self.token_ids.min()) < 0:
            raise InvalidInput(f"{name}.token_ids", f"has {int(self.token_ids.min())}; ids are >= 0")
        if len(self.action_mask) != length:
            problem = f"has {len(self.action_mask)} elements, the response has {length} tokens"
            raise InvalidInput(f"{name}.action_mask", problem)
        for part in ("logprobs", "teacher_logprobs"):
            self._check_logprobs(name, part, length)
        if not math.isfinite(self.reward):
            raise InvalidInput(f"{name}.reward", f"is {self.reward}, must be finite")
        self._check_spans(name, length)

    def _check_logprobs(self, name: str, part: str, length: int) -> None:
        values: np.ndarray | None = getattr(self, part)
        if values is None:
            return
        if len(values) != length:
            raise InvalidInput(f"{name}.{part}", f"has {len(values)} elements, the response has {length} tokens")
        sampled = values[self.action_mask]
        bad = np.flatnonzero(~(np.isfinite(sampled) & (sampled <= 1e-4)))
        if len(bad):
            problem = f"has {float(sampled[bad[0]])}; log-probabilities are finite and <= 0"
            raise InvalidInput(f"{name}.{part}", problem)

    def _check_spans(self, name: str, length: int) -> None:
        at, newest = 0, -1
        for span in self.version_spans:
            if span.start != at or span.end <= span.start or span.version < max(newest, 0):
                problem = f"{span} does not follow token {at} and version {newest}"
                raise InvalidInput(f"{name}.version_spans", problem)
            at, newest = span.end, span.version
        if at != length:
            raise InvalidInput(f"{name}.version_spans", f"cover [0, {at}), the response has {length} tokens")


class KeptExperience(Protocol):
    """An experience after the operators: a LedgerExperience, or the buffer's own kind of it."""

    @property
    def index(self) -> int: ...

    @property
    def reward(self) -> float: ...

    @property
    def masked(self) -> bool: ...


@dataclass(frozen=True)
class Group:
    """All rollouts of one task, made by one attempt."""

    task: Task
    attempt: int
    explorer_id: str
    experiences: tuple[Experience, ...]
    started_at_seconds: float
    finished_at_seconds: float

    def check(self) -> None:
        """Raise InvalidInput unless this group may enter the log."""
        if not self.experiences:
            raise InvalidInput("group.experiences", "is empty")
        for index, experience in enumerate(self.experiences):
            experience.check(f"group.experiences[{index}]")

    def as_kept(self, kept: Iterable[KeptExperience]) -> "Group":
        """The group as the ledger has it: what is kept, with its reward; no token of a masked one is trained.

        Nothing kept stands for a group that is trained as it was stored.
        """
        experiences = []
        for item in kept:
            experience = replace(self.experiences[item.index], reward=item.reward)
            if item.masked:
                experience = replace(experience, action_mask=np.zeros_like(experience.action_mask))
            experiences.append(experience)
        return replace(self, experiences=tuple(experiences)) if experiences else self

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest weight version that sampled a token; (0, 0) if no token was sampled."""
        seen = [span.version for experience in self.experiences for span in experience.version_spans] or [0]
        return min(seen), max(seen)

    @property
    def response_tokens(self) -> int:
        return sum(experience.response_length for experience in self.experiences)

    @property
    def reward_mean(self) -> float:
        return sum(experience.reward for experience in self.experiences) / len(self.experiences)


@dataclass(frozen=True)
class AttemptFailure:
    """One attempt that did not end in a group. With `final` it is the task's dead letter."""

    task: Task
    attempt: int
    explorer_id: str
    cause: FailureCause
    error: str
    final: bool
    failed_at_seconds: float


Outcome = Group | AttemptFailure
