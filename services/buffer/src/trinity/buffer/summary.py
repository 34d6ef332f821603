"""What the ledger must know of a group, and whether it may enter at all, read off the message itself.

The arrays of all rollouts are judged together: a group costs a few numpy calls, whatever its size. Only a group that
does not pass is taken apart, to name the field.
"""

import math

import numpy as np

from trinity.api.common.v1 import experience_pb2
from trinity.buffer.window import StoredGroup
from trinity.runtime.errors import InvalidInput
from trinity.runtime.wire import group_from_proto, task_from_proto


def summarise(sequence: int, message: experience_pb2.Group) -> StoredGroup:
    """Raises InvalidInput naming the first field that cannot be right (see Experience.check)."""
    if not _plausible(message):
        group_from_proto(message).check()
        raise InvalidInput("group", "its arrays do not fit together")
    task_from_proto(message.task)
    experiences = message.experiences
    versions = [span.version for experience in experiences for span in experience.version_spans] or [0]
    return StoredGroup(
        log_sequence=sequence,
        task_id=message.task.task_id,
        ordinal=message.task.ordinal,
        num_experiences=len(experiences),
        oldest_version=min(versions),
        newest_version=max(versions),
        num_response_tokens=sum(e.token_ids.shape[0] - e.prompt_length for e in experiences),
        reward_mean=sum(experience.reward for experience in experiences) / len(experiences),
    )


def _plausible(message: experience_pb2.Group) -> bool:
    """Whether every experience passes Experience.check; never raises."""
    experiences = message.experiences
    if not experiences or not all(map(_fits, experiences)):
        return False
    tokens = np.frombuffer(b"".join([e.token_ids.data for e in experiences]), np.int32)
    logprobs = np.frombuffer(b"".join([e.logprobs.data for e in experiences]), np.float32)
    sampled = logprobs[np.frombuffer(b"".join([e.action_mask.data for e in experiences]), bool)]
    # NaN fails both comparisons.
    return bool(tokens.min() >= 0 and ((sampled <= 1e-4) & (sampled > -np.inf)).all())


def _fits(experience: experience_pb2.Experience) -> bool:
    """Types, lengths, reward and version spans of one experience."""
    tokens, logprobs, mask = experience.token_ids, experience.logprobs, experience.action_mask
    length = len(tokens.data) // 4
    response = length - experience.prompt_length
    at, newest = 0, 0
    for span in experience.version_spans:
        if span.start != at or span.end <= at or span.version < newest:
            return False
        at, newest = span.end, span.version
    return (
        (tokens.dtype, logprobs.dtype, mask.dtype) == ("int32", "float32", "bool")
        and (list(tokens.shape), list(logprobs.shape), list(mask.shape)) == ([length], [response], [response])
        and (len(tokens.data), len(logprobs.data), len(mask.data)) == (4 * length, 4 * response, response)
        and 1 <= experience.prompt_length <= length
        and at == response
        and math.isfinite(experience.reward)
    )
