"""Between the shared domain types and their protobuf messages. Decoding checks what it reads (invariant I8)."""

import math

import numpy as np
from google.protobuf.message import DecodeError

from trinity.api.common.v1 import experience_pb2, task_pb2
from trinity.data.arrays import fill_tensor, from_tensor
from trinity.data.experience import (
    AttemptFailure,
    Experience,
    Group,
    Outcome,
    SamplingParams,
    Task,
    TaskKind,
    Truncation,
    VersionSpan,
)
from trinity.runtime.errors import FailureCause, InvalidInput

_KINDS = {TaskKind.TRAIN: task_pb2.TASK_KIND_TRAIN, TaskKind.EVALUATION: task_pb2.TASK_KIND_EVALUATION}
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}
TRUNCATIONS = {0, *(int(value) for value in Truncation)}
MOST_ROLLOUTS = 65_536
LONGEST_ERROR = 4000  # characters of a failure's text
LONGEST_TIMEOUT_SECONDS = 1e9  # asyncio adds it to a clock
_CAUSES = {cause.value for cause in FailureCause}
_PLAIN_TASK_FIELDS = (
    "run",
    "task_id",
    "ordinal",
    "taskset",
    "epoch",
    "row",
    "row_json",
    "format_json",
    "workflow",
    "workflow_args_json",
    "reward_function",
    "reward_args_json",
    "repeat_times",
    "gate_step",
    "evaluation_step",
    "timeout_seconds",
    "max_attempts",
    "life",
    "greedy_baseline",
)
_PLAIN_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "min_tokens",
    "n",
    "repetition_penalty",
    "ignore_eos",
)


def sampling_to_proto(sampling: SamplingParams) -> task_pb2.SamplingParams:
    plain = {name: getattr(sampling, name) for name in _PLAIN_SAMPLING_FIELDS}
    return task_pb2.SamplingParams(**plain, stop=sampling.stop, seed=sampling.seed)


def sampling_from_proto(message: task_pb2.SamplingParams) -> SamplingParams:
    plain = {name: getattr(message, name) for name in _PLAIN_SAMPLING_FIELDS}
    seed = message.seed if message.HasField("seed") else None
    return SamplingParams(**plain, stop=tuple(message.stop), seed=seed)


def task_to_proto(task: Task) -> task_pb2.Task:
    plain = {name: getattr(task, name) for name in _PLAIN_TASK_FIELDS}
    return task_pb2.Task(**plain, kind=_KINDS[task.kind], sampling=sampling_to_proto(task.sampling))


def task_from_proto(message: task_pb2.Task) -> Task:
    """Raises InvalidInput naming the field that is missing or out of range."""
    if message.kind not in _KINDS_BACK:
        raise InvalidInput("task.kind", f"is {message.kind}, must be TRAIN or EVALUATION")
    if not message.task_id:
        raise InvalidInput("task.task_id", "is empty")
    if not message.workflow:
        raise InvalidInput("task.workflow", "is empty")
    for name, least in (("repeat_times", 1), ("max_attempts", 1), ("gate_step", 0)):
        if getattr(message, name) < least:
            raise InvalidInput(f"task.{name}", f"is {getattr(message, name)}, must be >= {least}")
    if message.repeat_times > MOST_ROLLOUTS:
        raise InvalidInput("task.repeat_times", f"is {message.repeat_times}, must be <= {MOST_ROLLOUTS}")
    if not 0 < message.timeout_seconds <= LONGEST_TIMEOUT_SECONDS:
        problem = f"is {message.timeout_seconds}, must be in (0, {LONGEST_TIMEOUT_SECONDS:g}]"
        raise InvalidInput("task.timeout_seconds", problem)
    plain = {name: getattr(message, name) for name in _PLAIN_TASK_FIELDS}
    return Task(**plain, kind=_KINDS_BACK[message.kind], sampling=sampling_from_proto(message.sampling))


def _fill_experience(message: experience_pb2.Experience, experience: Experience) -> None:
    """In place: a message that is put into another one is copied, tensors and all."""
    message.rollout, message.step = experience.rollout, experience.step
    message.prompt_length, message.reward = experience.prompt_length, experience.reward
    fill_tensor(message.token_ids, experience.token_ids)
    fill_tensor(message.logprobs, experience.logprobs)
    fill_tensor(message.action_mask, experience.action_mask)
    for span in experience.version_spans:
        message.version_spans.add(version=span.version, start=span.start, end=span.end)
    message.truncation = int(experience.truncation)  # type: ignore[assignment]  # the stub knows no plain numbers
    message.metrics.update(experience.metrics)
    message.info_json = experience.info_json
    message.prompt_text, message.response_text = experience.prompt_text, experience.response_text
    if experience.teacher_logprobs is not None:
        fill_tensor(message.teacher_logprobs, experience.teacher_logprobs)


def experience_from_proto(message: experience_pb2.Experience, name: str = "experience") -> Experience:
    """Decode without judging the content: see Experience.check. Raises InvalidInput for a malformed array or enum."""
    if message.truncation not in TRUNCATIONS:
        raise InvalidInput(f"{name}.truncation", f"is {message.truncation}, must be one of {sorted(TRUNCATIONS)}")
    return Experience(
        rollout=message.rollout,
        step=message.step,
        token_ids=from_tensor(message.token_ids, f"{name}.token_ids", "int32"),
        prompt_length=message.prompt_length,
        logprobs=from_tensor(message.logprobs, f"{name}.logprobs", "float32"),
        action_mask=from_tensor(message.action_mask, f"{name}.action_mask", "bool"),
        reward=message.reward,
        version_spans=tuple(VersionSpan(s.version, s.start, s.end) for s in message.version_spans),
        truncation=Truncation(message.truncation or 1),
        metrics=dict(message.metrics),
        info_json=message.info_json,
        prompt_text=message.prompt_text,
        response_text=message.response_text,
        teacher_logprobs=_optional(message, "teacher_logprobs", name),
    )


def _optional(message: experience_pb2.Experience, field: str, name: str) -> np.ndarray | None:
    if not message.HasField(field):
        return None
    return from_tensor(getattr(message, field), f"{name}.{field}", "float32")


def fill_group(message: experience_pb2.Group, group: Group) -> None:
    message.task.CopyFrom(task_to_proto(group.task))
    message.attempt, message.explorer_id = group.attempt, group.explorer_id
    for experience in group.experiences:
        _fill_experience(message.experiences.add(), experience)
    message.started_at_seconds, message.finished_at_seconds = group.started_at_seconds, group.finished_at_seconds


def group_from_proto(message: experience_pb2.Group) -> Group:
    """Raises InvalidInput if the task or an array is malformed; the content is judged by Group.check."""
    return Group(
        task=task_from_proto(message.task),
        attempt=message.attempt,
        explorer_id=message.explorer_id,
        experiences=tuple(
            experience_from_proto(item, f"group.experiences[{index}]") for index, item in enumerate(message.experiences)
        ),
        started_at_seconds=message.started_at_seconds,
        finished_at_seconds=message.finished_at_seconds,
    )


def failure_to_proto(failure: AttemptFailure) -> experience_pb2.AttemptFailure:
    return experience_pb2.AttemptFailure(
        task=task_to_proto(failure.task),
        attempt=failure.attempt,
        explorer_id=failure.explorer_id,
        cause=failure.cause,
        error=failure.error[:LONGEST_ERROR],
        final=failure.final,
        failed_at_seconds=failure.failed_at_seconds,
    )


def failure_from_proto(message: experience_pb2.AttemptFailure) -> AttemptFailure:
    """Raises InvalidInput if the task is malformed or the cause unknown."""
    if message.cause not in _CAUSES:
        raise InvalidInput("failure.cause", f"is {message.cause[:80]!r}, must be one of {', '.join(sorted(_CAUSES))}")
    if not math.isfinite(message.failed_at_seconds):
        raise InvalidInput("failure.failed_at_seconds", f"is {message.failed_at_seconds}, must be Unix time")
    return AttemptFailure(
        task=task_from_proto(message.task),
        attempt=message.attempt,
        explorer_id=message.explorer_id,
        cause=FailureCause(message.cause),
        error=message.error,
        final=message.final,
        failed_at_seconds=message.failed_at_seconds,
    )


def encode_outcome(outcome: Outcome) -> bytes:
    """An entry of the experience log."""
    if isinstance(outcome, Group):
        message = experience_pb2.Outcome()
        fill_group(message.group, outcome)
        return message.SerializeToString()
    return experience_pb2.Outcome(failure=failure_to_proto(outcome)).SerializeToString()


def parse_outcome(data: bytes) -> experience_pb2.Outcome:
    try:
        return experience_pb2.Outcome.FromString(data)
    except DecodeError as error:
        raise InvalidInput("outcome", f"is not a trinity.api.common.v1.Outcome: {error}") from None


def decode_outcome(data: bytes) -> Outcome:
    """Inverse of encode_outcome. Raises InvalidInput for anything else, a blob reference included."""
    return outcome_from_proto(parse_outcome(data))


def outcome_from_proto(message: experience_pb2.Outcome) -> Outcome:
    """A group or a failure. Raises InvalidInput for anything else."""
    kind = message.WhichOneof("outcome")
    if kind == "group":
        return group_from_proto(message.group)
    if kind == "failure":
        return failure_from_proto(message.failure)
    raise InvalidInput("outcome", f"holds {kind or 'nothing'}; expected a group or a failure")
