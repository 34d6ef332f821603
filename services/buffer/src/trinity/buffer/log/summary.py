"""What the ledger must know of a group, and whether it may enter at all, read off the message itself.

The arrays of all rollouts are checked together: a group costs a few numpy calls, independent of its size. Only a group
that does not pass is decoded, to name the field.
"""

import json
from collections.abc import Iterable

import numpy as np

from trinity.api.common.v1 import experience_pb2
from trinity.buffer.state.window import StoredGroup
from trinity.data.experience import UNLIMITED, Limits, check_header, check_rollouts, is_number
from trinity.data.wire import TRUNCATIONS, group_from_proto, is_boolean, task_from_proto

_ANY_LENGTH = 2**31


def summarise(
    sequence: int, message: experience_pb2.Group, limits: Limits = UNLIMITED, task_is_sound: bool = False
) -> StoredGroup:
    """Raises InvalidInput naming the first field that cannot be right (see Group.check).

    `task_is_sound`: it is word for word what the buffer fed.
    """
    if not task_is_sound:
        task_from_proto(message.task)
    check_header(message)
    check_rollouts(message.task.repeat_times, message.experiences)
    if not _plausible(message, limits):
        group_from_proto(message).check(limits)
    return without_check(sequence, message)


def without_check(sequence: int, message: experience_pb2.Group) -> StoredGroup:
    """Of a group that failed validation, with any content."""
    experiences = message.experiences
    versions = [span.version for experience in experiences for span in experience.version_spans] or [0]
    return StoredGroup(
        log_sequence=sequence,
        task_id=message.task.task_id,
        ordinal=message.task.ordinal,
        num_experiences=len(experiences),
        oldest_version=min(versions),
        newest_version=max(versions),
        num_response_tokens=sum(max(0, sum(e.token_ids.shape) - e.prompt_length) for e in experiences),
        num_sampled_tokens=sum(e.action_mask.data.count(1) for e in experiences),
        prompt_cut=any(e.truncation == experience_pb2.TRUNCATION_PROMPT for e in experiences),
        reward_mean=sum(experience.reward for experience in experiences) / max(1, len(experiences)),
    )


def _plausible(message: experience_pb2.Group, limits: Limits) -> bool:
    """Whether every experience surely passes Experience.check; never raises."""
    all_tokens, all_logprobs, all_masks = [], [], []
    longest = limits.tokens or _ANY_LENGTH
    for experience in message.experiences:
        ids, logs, actions = experience.token_ids, experience.logprobs, experience.action_mask
        tokens, logprobs, mask = ids.data, logs.data, actions.data
        length, response, prompt = len(tokens) // 4, len(mask), experience.prompt_length
        if ids.dtype != "int32" or logs.dtype != "float32" or actions.dtype != "bool":
            return False
        if ids.shape != [length] or logs.shape != [response] or actions.shape != [response]:
            return False
        if len(tokens) != 4 * length or len(logprobs) != 4 * response:
            return False
        if prompt < 1 or prompt + response != length or length > longest or not is_number(experience.reward):
            return False
        if experience.rollout < 0 or experience.step < 0 or experience.truncation not in TRUNCATIONS:
            return False
        if experience.HasField("teacher_logprobs") or not _is_json_object(experience.info_json):
            return False  # the first is rare
        if limits.numbers and experience.info_json:
            return False
        if not all(map(is_number, experience.metrics.values())):
            return False
        if not _covers(experience.version_spans, response):
            return False
        all_tokens.append(tokens)
        all_logprobs.append(logprobs)
        all_masks.append(mask)
    if not all_tokens:
        return False
    sampled = np.frombuffer(b"".join(all_logprobs), np.float32)[np.frombuffer(b"".join(all_masks), bool)]
    # NaN fails both comparisons.
    plausible = ((sampled <= 1e-4) & (sampled > -np.inf)).all()
    plausible &= is_boolean(b"".join(all_masks))
    joined = np.frombuffer(b"".join(all_tokens), np.int32)
    return bool(plausible and joined.min() >= 0 and joined.max() < limits.ids_below)


def _is_json_object(text: str) -> bool:
    try:
        return not text or isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _covers(spans: Iterable[experience_pb2.VersionSpan], response: int) -> bool:
    """Whether the spans follow each other over all response tokens, with versions that do not fall."""
    at, newest = 0, 0
    for span in spans:
        if span.start != at or span.end <= at or span.version < newest:
            return False
        at, newest = span.end, span.version
    return at == response
