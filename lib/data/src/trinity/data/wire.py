"""Converts the shared domain types to and from protobuf messages. Decoding validates its input (invariant I8).

Arrays travel as dtype + shape + bytes (invariant I9).
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from trinity.api.common.v1 import experience_pb2, task_pb2, tensor_pb2
from trinity.data.experience import (
    LATEST_SECONDS,
    MOST_ROLLOUTS,
    AttemptFailure,
    Experience,
    Group,
    Limits,
    Outcome,
    SamplingParams,
    Task,
    TaskKind,
    Truncation,
)
from trinity.data.images import PlacedImage, digest
from trinity.data.top_tokens import TopTokens
from trinity.data.traffic import CallReward, RecordedCall
from trinity.runtime.errors import FailureCause, InvalidInput
from trinity.runtime.messages import from_message, to_message
from trinity.runtime.names import BlobReference

_KINDS = {TaskKind.TRAIN: task_pb2.TASK_KIND_TRAIN, TaskKind.EVALUATION: task_pb2.TASK_KIND_EVALUATION}
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}
_TRUNCATIONS = {0, *(int(value) for value in Truncation)}
LONGEST_ERROR = 4000  # characters of a failure's text
LONGEST_TIMEOUT_SECONDS = 1e9  # asyncio adds it to a clock
_CAUSES = {cause.value for cause in FailureCause}
_ARRAYS = {"token_ids": "int32", "logprobs": "float32", "action_mask": "bool", "teacher_logprobs": "float32"}
_DTYPES = {name: np.dtype(name) for name in ("int32", "int64", "float32", "float64", "bool")}


def to_tensor(array: np.ndarray) -> tensor_pb2.Tensor:
    """A Tensor with the array's dtype, which must be int32, int64, float32, float64 or bool."""
    tensor = tensor_pb2.Tensor()
    fill_tensor(tensor, array)
    return tensor


def fill_tensor(tensor: tensor_pb2.Tensor, array: np.ndarray) -> None:
    """Like `to_tensor`, into an existing message."""
    name = array.dtype.name
    if name not in _DTYPES:
        raise TypeError(f"dtype {name} cannot be sent; use one of {', '.join(_DTYPES)}")
    tensor.dtype = name
    tensor.shape.extend(array.shape)
    tensor.data = array.tobytes()


def from_tensor(tensor: tensor_pb2.Tensor, field: str, dtype: str, ndim: int = 1) -> np.ndarray:
    """The array of a Tensor (read-only, no copy). Raises InvalidInput naming `field` for another dtype or ndim."""
    if tensor.dtype != dtype:
        raise InvalidInput(f"{field}.dtype", f"is {tensor.dtype!r}, must be {dtype!r}")
    shape = tuple(tensor.shape)
    if len(shape) != ndim or any(size < 0 for size in shape):
        raise InvalidInput(f"{field}.shape", f"is {list(shape)}, must have {ndim} dimension(s) of size >= 0")
    expected = math.prod(shape) * _DTYPES[dtype].itemsize
    if len(tensor.data) != expected:
        raise InvalidInput(f"{field}.data", f"has {len(tensor.data)} bytes; {dtype}{list(shape)} needs {expected}")
    if dtype == "bool" and tensor.data.translate(None, b"\0\1"):  # numpy and torch give others no defined meaning
        raise InvalidInput(f"{field}.data", "has bytes other than 0 and 1")
    return np.frombuffer(tensor.data, dtype=_DTYPES[dtype]).reshape(shape)


def sampling_from_proto(message: task_pb2.SamplingParams) -> SamplingParams:
    return from_message(SamplingParams, message)


def task_to_proto(task: Task) -> task_pb2.Task:
    return to_message(task, task_pb2.Task, kind=_KINDS[task.kind])


def task_from_proto(message: task_pb2.Task) -> Task:
    """Raises InvalidInput naming a field that is missing or out of range."""
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
    return from_message(Task, message, kind=_KINDS_BACK[message.kind])


def task_to_json(task: Task) -> dict[str, Any]:
    """protobuf's JSON of a task, for archives."""
    return json_format.MessageToDict(task_to_proto(task), preserving_proto_field_name=True)


def task_from_json(values: dict[str, Any]) -> Task:
    """Inverse of task_to_json. Raises InvalidInput."""
    try:
        return task_from_proto(json_format.ParseDict(values, task_pb2.Task()))
    except (json_format.ParseError, OverflowError, SystemError) as error:  # SystemError: half a surrogate pair in a key
        raise InvalidInput("task", str(error)) from None


def decode_task(data: bytes) -> Task:
    """Like `task_from_proto`. Raises InvalidInput also for bytes that are no task."""
    try:
        return task_from_proto(task_pb2.Task.FromString(data))
    except DecodeError as error:
        raise InvalidInput("task", f"is no task message: {error}") from None


@contextlib.contextmanager
def _naming(field: str, value: Any) -> Iterator[None]:
    """Raises InvalidInput naming the field for a value that no message can hold."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidInput(field, f"is {value!a:.100}, which cannot be stored: {error}") from None


def _fill_experience(message: experience_pb2.Experience, experience: Experience, name: str = "call.experience") -> None:
    """Fills the message in place, because protobuf copies a message that is added to another one. Raises InvalidInput
    naming a field of a wrong type, or a text with half a surrogate pair.
    """
    for field in ("rollout", "step", "prompt_length", "reward", "info_json", "prompt_text", "response_text"):
        value = getattr(experience, field)
        with _naming(f"{name}.{field}", value):
            setattr(message, field, value)
    for field, dtype in _ARRAYS.items():
        array = getattr(experience, field)
        if array is None and field == "teacher_logprobs":
            continue
        if getattr(array, "dtype", None) != dtype:
            problem = f"is {getattr(array, 'dtype', type(array).__name__)}, must be a numpy array of {dtype}"
            raise InvalidInput(f"{name}.{field}", problem)
        fill_tensor(getattr(message, field), array)
    with _naming(f"{name}.version_spans", experience.version_spans):
        for span in experience.version_spans:
            message.version_spans.add(**vars(span))
    with _naming(f"{name}.truncation", experience.truncation):
        message.truncation = int(experience.truncation)  # type: ignore[assignment]  # the stub knows no plain numbers
    with _naming(f"{name}.metrics", experience.metrics):
        message.metrics.update(experience.metrics)
    if experience.routes is not None:
        with _naming(f"{name}.routes", experience.routes):
            message.routes.CopyFrom(to_message(experience.routes, experience_pb2.Routes))
    if experience.teacher_top is not None:
        with _naming(f"{name}.teacher_top", experience.teacher_top):
            fill_tensor(message.teacher_top.ids, experience.teacher_top.ids)
            fill_tensor(message.teacher_top.logprobs, experience.teacher_top.logprobs)
    with _naming(f"{name}.images", experience.images):
        for image in experience.images:
            message.images.add(digest=image.digest, start=image.start)


def experience_from_proto(
    message: experience_pb2.Experience, name: str = "experience", files: Mapping[bytes, bytes] | None = None
) -> Experience:
    """Decode; Experience.check validates the content. `files` has the images by digest.

    Raises InvalidInput for a malformed array or enum, and for a missing image.
    """
    if message.truncation not in _TRUNCATIONS:
        raise InvalidInput(f"{name}.truncation", f"is {message.truncation}, must be one of {sorted(_TRUNCATIONS)}")
    teacher = message.teacher_logprobs if message.HasField("teacher_logprobs") else None
    return from_message(
        Experience,
        message,
        token_ids=from_tensor(message.token_ids, f"{name}.token_ids", "int32"),
        logprobs=from_tensor(message.logprobs, f"{name}.logprobs", "float32"),
        action_mask=from_tensor(message.action_mask, f"{name}.action_mask", "bool"),
        truncation=Truncation(message.truncation or 1),
        metrics=dict(message.metrics),
        teacher_logprobs=None if teacher is None else from_tensor(teacher, f"{name}.teacher_logprobs", "float32"),
        images=_placed(message, name, files or {}),
        teacher_top=_top_tokens(message.teacher_top, f"{name}.teacher_top")
        if message.HasField("teacher_top")
        else None,
    )


def _top_tokens(message: experience_pb2.TopTokens, name: str) -> TopTokens:
    ids = from_tensor(message.ids, f"{name}.ids", "int32", 2)
    return TopTokens(ids, from_tensor(message.logprobs, f"{name}.logprobs", "float32", 2))


def _placed(message: experience_pb2.Experience, name: str, files: Mapping[bytes, bytes]) -> tuple[PlacedImage, ...]:
    for index, image in enumerate(message.images):
        if image.digest not in files:
            what = f"is {image.digest[:32].hex()!r}, which is no image of the task or the group"
            raise InvalidInput(f"{name}.images[{index}].digest", what)
    return tuple(PlacedImage(image.start, files[image.digest]) for image in message.images)


def fill_group(message: experience_pb2.Group, group: Group) -> None:
    message.task.CopyFrom(task_to_proto(group.task))
    message.attempt, message.explorer_id = group.attempt, group.explorer_id
    for index, experience in enumerate(group.experiences):
        _fill_experience(message.experiences.add(), experience, f"group.experiences[{index}]")
    of_task = set(group.task.images)
    shown = dict.fromkeys(image.file for experience in group.experiences for image in experience.images)
    message.images.extend(file for file in shown if file not in of_task)
    message.started_at_seconds, message.finished_at_seconds = group.started_at_seconds, group.finished_at_seconds


def group_from_proto(message: experience_pb2.Group) -> Group:
    """Decode; Group.check validates the content.

    Raises InvalidInput for a malformed task or array, for a missing image, and for an image without an experience.
    """
    files = {digest(file): file for file in (*message.task.images, *message.images)}
    used = {image.digest for item in message.experiences for image in item.images}
    for index, file in enumerate(message.images):
        if digest(file) not in used:
            raise InvalidInput(f"group.images[{index}]", "is in no experience")
    experiences = (
        experience_from_proto(item, f"group.experiences[{index}]", files)
        for index, item in enumerate(message.experiences)
    )
    return from_message(Group, message, task=task_from_proto(message.task), experiences=tuple(experiences))


def failure_to_proto(failure: AttemptFailure) -> experience_pb2.AttemptFailure:
    task, error = task_to_proto(failure.task), failure.error[:LONGEST_ERROR]
    return to_message(failure, experience_pb2.AttemptFailure, task=task, error=error)


def failure_from_proto(message: experience_pb2.AttemptFailure) -> AttemptFailure:
    """Raises InvalidInput for a malformed task, an unknown cause, a text that is too long, or an impossible time."""
    if message.cause not in _CAUSES:
        raise InvalidInput("failure.cause", f"is {message.cause[:80]!r}, must be one of {', '.join(sorted(_CAUSES))}")
    if len(message.error) > LONGEST_ERROR:
        raise InvalidInput("failure.error", f"has {len(message.error)} characters, may have {LONGEST_ERROR}")
    if not 0 <= message.failed_at_seconds <= LATEST_SECONDS:
        raise InvalidInput("failure.failed_at_seconds", f"is {message.failed_at_seconds}, must be Unix time")
    task, cause = task_from_proto(message.task), FailureCause(message.cause)
    return from_message(AttemptFailure, message, task=task, cause=cause)


def encode_outcome(outcome: Outcome) -> bytes:
    """An entry of the experience log. Raises InvalidInput naming a field that no message can hold."""
    if isinstance(outcome, Group):
        message = experience_pb2.Outcome()
        fill_group(message.group, outcome)
        return message.SerializeToString()
    return experience_pb2.Outcome(failure=failure_to_proto(outcome)).SerializeToString()


def encode_fence(versions: Iterable[int]) -> bytes:
    """An entry of the experience log that withdraws these weight versions."""
    return experience_pb2.Outcome(fence=experience_pb2.Fence(versions=sorted(versions))).SerializeToString()


def encode_reference(blob: BlobReference) -> bytes:
    """An entry of the experience log whose outcome is in a blob."""
    return experience_pb2.Outcome(blob=to_message(blob, experience_pb2.BlobReference)).SerializeToString()


def reference_in(outcome: experience_pb2.Outcome) -> BlobReference:
    """The reference to the blob that holds an outcome."""
    return from_message(BlobReference, outcome.blob)


def parse_outcome(data: bytes) -> experience_pb2.Outcome:
    try:
        return experience_pb2.Outcome.FromString(data)
    except DecodeError as error:
        raise InvalidInput("outcome", f"is not a trinity.api.common.v1.Outcome: {error}") from None


def decode_outcome(data: bytes) -> Outcome:
    """Inverse of encode_outcome. Raises InvalidInput for other messages, including blob references."""
    return outcome_from_proto(parse_outcome(data))


def outcome_from_proto(message: experience_pb2.Outcome) -> Outcome:
    """A group or a failure. Raises InvalidInput for other messages."""
    kind = message.WhichOneof("outcome")
    if kind == "group":
        return group_from_proto(message.group)
    if kind == "failure":
        return failure_from_proto(message.failure)
    raise InvalidInput("outcome", f"holds {kind or 'nothing'}; expected a group or a failure")


def encode_call(call: RecordedCall) -> bytes:
    """A recorded call, in the stream of traffic."""
    message = to_message(call, experience_pb2.RecordedCall, experience=None)
    _fill_experience(message.experience, call.experience)
    return message.SerializeToString()


def decode_call(data: bytes, limits: Limits) -> RecordedCall:
    """Inverse of encode_call. Raises InvalidInput."""
    try:
        message = experience_pb2.RecordedCall.FromString(data)
    except DecodeError as error:
        raise InvalidInput("call", f"is no trinity.api.common.v1.RecordedCall: {error}") from None
    call = from_message(RecordedCall, message, experience=experience_from_proto(message.experience, "call.experience"))
    call.check(limits)
    return call


def encode_reward(reward: CallReward) -> bytes:
    """The reward of a recorded call, in the same stream."""
    return to_message(reward, experience_pb2.CallReward).SerializeToString()


def decode_reward(data: bytes, limits: Limits) -> CallReward:
    """Inverse of encode_reward. Raises InvalidInput."""
    try:
        reward = from_message(CallReward, experience_pb2.CallReward.FromString(data))
    except DecodeError as error:
        raise InvalidInput("reward", f"is no trinity.api.common.v1.CallReward: {error}") from None
    reward.check(limits)
    return reward
