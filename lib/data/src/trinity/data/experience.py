"""Domain types that all services share: tasks and their outcomes. They are frozen; `wire` converts them at the edges.

Life of a task: fed by the buffer -> leased by an explorer -> stored as a Group, or a dead letter (an AttemptFailure
with `final`), or cut by a step that did not wait for it. Dimensions: P prompt tokens, R response tokens.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from trinity.config.experts import Mixture
from trinity.data.images import MOST_IMAGES, PlacedImage, check_placeholders
from trinity.data.json_objects import json_object
from trinity.data.routes import Routes
from trinity.data.top_tokens import TopTokens
from trinity.data.vision import ImageRules
from trinity.runtime.errors import FailureCause, InvalidInput

MOST_ROLLOUTS = 65_536  # of one task; also completions of one request
ROLLOUTS_PER_REPEAT = 8  # a game has at most that many players
MOST_STEPS = 4096  # of one rollout: experiences that an algorithm for several steps takes for its turns
MOST_METRICS = 1000  # of one experience; each is a series of the monitor
LONGEST_NAME = 256
LATEST_SECONDS = 1e11  # Unix time of the year 5138
# Rewards and metrics are summed and squared: the largest float32 leaves room for both in float64.
LARGEST_NUMBER = 3.4e38
# Above every model's vocabulary. The limit bounds what a process allocates for an id of an unknown vocabulary.
LARGEST_VOCABULARY = 2**24
# Probability of at least 0.999. Far from what rounding in other batches changes of two tokens together.
_CERTAIN = np.log(0.999)
# Below these, rounding in another batch can make certain of one token what was certain of another.
_LEAST_TEMPERATURE, _LEAST_TOP_P = 0.1, 0.6


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings. task.proto has their ranges."""

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
            ("temperature", 0 <= self.temperature < math.inf, ">= 0 and finite"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= -1, ">= -1"),
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"in [0, max_tokens = {self.max_tokens}]"),
            ("n", 1 <= self.n <= MOST_ROLLOUTS, f"in [1, {MOST_ROLLOUTS}]"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "> 0 and finite"),
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

    With `greedy_baseline`, the last rollout is sampled at temperature 0, as the baseline of the others (ReMax).
    `images` has the bytes of image files.
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
    requeues: int = 0
    greedy_baseline: bool = False
    images: tuple[bytes, ...] = ()

    @property
    def raw(self) -> dict[str, Any]:
        """The dataset row."""
        return json_object(self.row_json, "task.row_json")

    @property
    def format(self) -> dict[str, Any]:
        """The taskset's `format` section."""
        return json_object(self.format_json, "task.format_json")

    @property
    def workflow_args(self) -> dict[str, Any]:
        return json_object(self.workflow_args_json, "task.workflow_args_json")


@dataclass(frozen=True)
class Limits:
    """A run's limits for one experience.

    tokens: most tokens, 0 if unknown.
    vocabulary: token ids are below it, 0 if unknown.
    numbers: entries of info that must be numbers if present, because the advantage calculates with them.
    teacher: the advantage compares each sampled token with a teacher.
    images: rules by which the model reads images; None for a text model or unknown rules.
    reward: rewards are within plus and minus this number (explorer.reward_bound).
    logprob: log-probabilities are not below minus this number (explorer.logprob_bound).
    mixture: sizes of the model's experts, which recorded routes must have; None if they are unknown.
    teacher_top: number of a teacher's likeliest tokens that the loss reads in each place; 0 if it reads none.
    """

    tokens: int = 0
    vocabulary: int = 0
    numbers: tuple[str, ...] = ()
    teacher: bool = False
    images: ImageRules | None = None
    reward: float = LARGEST_NUMBER
    logprob: float = LARGEST_NUMBER
    mixture: Mixture | None = None
    teacher_top: int = 0

    @property
    def ids_below(self) -> int:
        """Token ids are below this number, also for an unknown vocabulary."""
        return self.vocabulary or LARGEST_VOCABULARY


UNLIMITED = Limits()


MOST_OF_PRECISION = 64  # characters


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by weight version `version`, in the engine's `precision`."""

    version: int
    start: int
    end: int
    precision: str = ""  # as in common.v1.VersionSpan


class Truncation(IntEnum):
    NONE = 1
    PROMPT = 2
    RESPONSE = 3


@dataclass(frozen=True)
class Experience:
    """One sampled trajectory, or one step of it.

    token_ids int32 [P + R], logprobs float32 [R], action_mask bool [R]; reward in the environment's unit.
    teacher_logprobs float32 [R], of the same tokens; None without a teacher. images: the images among the tokens, in
    order; the policy sampled none of their placeholders. routes: experts of its tokens; None if they were not recorded.
    teacher_top: a teacher's likeliest tokens in the place of each response token; None where no loss reads them.
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
    images: tuple[PlacedImage, ...] = ()
    routes: Routes | None = None
    teacher_top: TopTokens | None = None

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def precisions(self) -> list[str]:
        """Returns the precisions of the engines that sampled it, without unrecorded ones."""
        return sorted({span.precision for span in self.version_spans} - {""})

    @property
    def moved(self) -> dict[str, Any]:
        """{"moved": info.moved} if the episode moved to another explorer, else empty."""
        moves = json_object(self.info_json, "info_json").get("moved")
        return {"moved": moves} if moves else {}

    def check(self, name: str, limits: Limits = UNLIMITED) -> None:
        """Raise InvalidInput naming the first invalid field (invariants I5, I8)."""
        length = self.response_length
        for part, number in (("rollout", self.rollout), ("step", self.step)):
            if number < 0:
                raise InvalidInput(f"{name}.{part}", f"is {number}, must be >= 0")
        if limits.tokens and len(self.token_ids) > limits.tokens:
            raise InvalidInput(
                f"{name}.token_ids", f"has {len(self.token_ids)} tokens, the model takes {limits.tokens}"
            )
        if not 1 <= self.prompt_length <= len(self.token_ids):
            problem = f"is {self.prompt_length}, must be in [1, {len(self.token_ids)}]"
            raise InvalidInput(f"{name}.prompt_length", problem)
        if len(self.token_ids) and int(self.token_ids.min()) < 0:
            raise InvalidInput(f"{name}.token_ids", f"has {int(self.token_ids.min())}; ids are >= 0")
        if len(self.token_ids) and int(self.token_ids.max()) >= limits.ids_below:
            of = "this model" if limits.vocabulary else "any model"
            problem = f"has {int(self.token_ids.max())}; ids of {of} are below {limits.ids_below}"
            raise InvalidInput(f"{name}.token_ids", problem)
        if len(self.action_mask) != length:
            problem = f"has {len(self.action_mask)} elements, the response has {length} tokens"
            raise InvalidInput(f"{name}.action_mask", problem)
        for part in ("logprobs", "teacher_logprobs"):
            self._check_logprobs(name, part, length, limits.logprob)
        if limits.teacher and self.teacher_logprobs is None and self.action_mask.any():
            problem = "is missing; the run's advantage needs a teacher's log-probabilities, which its workflow asks for"
            raise InvalidInput(f"{name}.teacher_logprobs", problem)
        for part, value in (("reward", self.reward), *((f"metrics[{key!r}]", v) for key, v in self.metrics.items())):
            if not is_number(value):
                raise InvalidInput(f"{name}.{part}", f"is {value}, must be finite and fit into float32")
        if not is_number(self.reward, limits.reward):
            raise InvalidInput(f"{name}.reward", reward_problem(self.reward, limits.reward))
        check_metric_names(f"{name}.metrics", self.metrics)
        info = json_object(self.info_json, f"{name}.info_json")
        for key in limits.numbers:
            value = info.get(key, 0.0)
            if not isinstance(value, int | float | None) or not is_number(value or 0.0):
                raise InvalidInput(f"{name}.info_json", f"has {value!r:.100} for {key!r}, must be a finite number")
        self._check_spans(name, length)
        if self.images:
            self._check_images(name, limits)
        if self.routes is not None:
            self.routes.check(f"{name}.routes", len(self.token_ids), limits.mixture)
        if self.teacher_top is not None:
            self.teacher_top.check(f"{name}.teacher_top", length, limits.ids_below, limits.logprob)
        found = 0 if self.teacher_top is None else self.teacher_top.ids.shape[1]
        if found < limits.teacher_top and self.action_mask.any():
            problem = f"has {found} tokens for each place; the run's loss reads {limits.teacher_top} of a teacher's"
            raise InvalidInput(f"{name}.teacher_top", problem)

    def _check_images(self, name: str, limits: Limits) -> None:
        if len(self.images) > MOST_IMAGES:
            raise InvalidInput(f"{name}.images", f"are {len(self.images)}, at most {MOST_IMAGES}")
        if limits.images is None:
            return
        # A trained token is no placeholder of an image.
        shown = np.concatenate([np.ones(self.prompt_length, bool), ~self.action_mask])
        tokens = np.where(shown, self.token_ids, -1).tolist()
        check_placeholders(f"{name}.token_ids", tokens, self.images, limits.images)

    def _check_logprobs(self, name: str, part: str, length: int, bound: float) -> None:
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
        if len(sampled) and (least := float(sampled.min())) < -bound:
            problem = f"has {least:g}, must be at least {-bound:g}; explorer.logprob_bound allows more"
            raise InvalidInput(f"{name}.{part}", problem)

    def _check_spans(self, name: str, length: int) -> None:
        at, newest = 0, -1
        for span in self.version_spans:
            if span.start != at or span.end <= span.start or span.version < max(newest, 0):
                problem = f"{span} does not follow token {at} and version {newest}"
                raise InvalidInput(f"{name}.version_spans", problem)
            if len(span.precision) > MOST_OF_PRECISION:
                raise InvalidInput(f"{name}.version_spans", f"name a precision of {len(span.precision)} characters")
            at, newest = span.end, span.version
        if at != length:
            raise InvalidInput(f"{name}.version_spans", f"cover [0, {at}), the response has {length} tokens")


def is_number(value: float, bound: float = LARGEST_NUMBER) -> bool:
    """Returns True for a finite reward or metric within the bound; by default within the range of float32."""
    return -bound <= value <= bound


def reward_problem(value: float, bound: float) -> str:
    return f"is {value:g}, must be in [{-bound:g}, {bound:g}]; scale it, or raise explorer.reward_bound"


def check_metric_names(name: str, metrics: Collection[str]) -> None:
    """Raise InvalidInput for more metrics or longer names than a monitor can show, and for a name that is no text."""
    if len(metrics) > MOST_METRICS:
        raise InvalidInput(name, f"are {len(metrics)}; an experience has at most {MOST_METRICS}")
    if metrics and (longest := max(map(len, metrics))) > LONGEST_NAME:
        raise InvalidInput(name, f"have a name of {longest} characters, may have {LONGEST_NAME}")
    try:
        "".join(metrics).encode()
    except UnicodeEncodeError:
        raise InvalidInput(name, "have a name with half a surrogate pair (\\ud800 to \\udfff); remove it") from None


class KeptExperience(Protocol):
    """An experience after the operators: a LedgerExperience, or the buffer's type for it."""

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

    def check(self, limits: Limits = UNLIMITED) -> None:
        """Raise InvalidInput for a group that may not enter the log."""
        if not self.experiences:
            raise InvalidInput("group.experiences", "is empty")
        check_attempt("group", self.attempt, self.explorer_id)
        for name in ("started_at_seconds", "finished_at_seconds"):
            if not 0 <= getattr(self, name) <= LATEST_SECONDS:
                raise InvalidInput(f"group.{name}", f"is {getattr(self, name)}, must be Unix time")
        self._check_rollouts()
        for index, experience in enumerate(self.experiences):
            experience.check(f"group.experiences[{index}]", limits)
        _check_certainties(self.task.sampling, [one for one in self.experiences if not one.images])

    def _check_rollouts(self) -> None:
        """Raise InvalidInput for more than eight times the task's rollouts, or for too many steps, or one twice.

        A workflow may fail to make all rollouts, or give several experiences for each: one of each player of a game.
        """
        most = ROLLOUTS_PER_REPEAT * self.task.repeat_times
        seen, steps = set(), Counter[int]()
        for index, experience in enumerate(self.experiences):
            if experience.rollout >= most:
                what = f"a task with repeat_times {self.task.repeat_times} has at most {most} rollouts"
                raise InvalidInput(f"group.experiences[{index}].rollout", f"is {experience.rollout}; {what}")
            if (key := (experience.rollout, experience.step)) in seen:
                raise InvalidInput(f"group.experiences[{index}].step", f"{key[1]} of rollout {key[0]} is there twice")
            seen.add(key)
            steps[experience.rollout] += 1
            if steps[experience.rollout] > MOST_STEPS:
                what = f"is one more than the {MOST_STEPS} steps that a rollout may have; lower workflow_args.max_turns"
                raise InvalidInput(f"group.experiences[{index}].step", f"{key[1]} of rollout {key[0]} {what}")

    def as_kept(self, kept: Iterable[KeptExperience]) -> "Group":
        """The group with the ledger's experiences and rewards. No token of a masked experience is trained.

        An empty `kept` stands for a group that is trained as stored.
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
        """Oldest and newest weight version that sampled a token. (0, 0) without a sampled token."""
        seen = [span.version for experience in self.experiences for span in experience.version_spans] or [0]
        return min(seen), max(seen)

    @property
    def response_tokens(self) -> int:
        return sum(experience.response_length for experience in self.experiences)

    @property
    def sampled_tokens(self) -> int:
        """Number of response tokens without those of environments and templates."""
        return sum(int(np.count_nonzero(experience.action_mask)) for experience in self.experiences)

    @property
    def reward_mean(self) -> float:
        return sum(experience.reward for experience in self.experiences) / len(self.experiences)


def check_attempt(name: str, attempt: int, explorer_id: str) -> None:
    """Raise InvalidInput unless attempt and explorer are given."""
    if attempt < 1:
        raise InvalidInput(f"{name}.attempt", f"is {attempt}, must be >= 1")
    if not 1 <= len(explorer_id) <= LONGEST_NAME:
        raise InvalidInput(f"{name}.explorer_id", f"has {len(explorer_id)} characters, must have 1 to {LONGEST_NAME}")


def _check_certainties(sampling: SamplingParams, group: Sequence[Experience]) -> None:
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
        if not len(differs) or one.prompt_length != other.prompt_length:
            continue
        at = int(differs[0]) - one.prompt_length
        if at < 0 or not (one.action_mask[at] and other.action_mask[at]):
            continue
        first, second = one.version_spans[0], other.version_spans[0]
        if first.version != second.version or at >= min(first.end, second.end):
            continue
        if min(one.logprobs[at], other.logprobs[at]) > _CERTAIN:
            raise InvalidInput(
                f"group.experiences[{after}].logprobs",
                f"has {float(other.logprobs[at]):g} for token {at}, and experiences[{before}] has "
                f"{float(one.logprobs[at]):g} for another token after the same ones; both cannot be certain, so these "
                "are not the log-probabilities of the sampled tokens",
            )


@dataclass(frozen=True)
class AttemptFailure:
    """An attempt without a group. With `final`, it is the task's dead letter."""

    task: Task
    attempt: int
    explorer_id: str
    cause: FailureCause
    error: str
    final: bool
    failed_at_seconds: float


Outcome = Group | AttemptFailure
