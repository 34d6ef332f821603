"""Parts of a fork as the parent's buffer gives them, and stored groups with other rewards."""

import hashlib
from collections.abc import Mapping, Sequence

from trinity.api.buffer.v1 import buffer_pb2
from trinity.data.wire import parse_outcome
from trinity.reading.wire import Facts, batch

# Metrics of a rollout that do not come from its reward.
_MEASURES = ("response_tokens", "response_truncated", "prompt_truncated", "bad_format", "long_replies", "steps")


def group_part(part: bytes) -> tuple[int, bytes] | None:
    """Returns ordinal and payload of the group in an encoded part of a fork; None for an entry."""
    message = buffer_pb2.BatchPart.FromString(part)
    return (message.group.ordinal, message.group.outcome) if message.WhichOneof("part") == "group" else None


def entry_part(part: bytes) -> Facts | None:
    """Returns the ledger entry in an encoded part of a fork, as `batch` does; None for a group."""
    message = buffer_pb2.BatchPart.FromString(part)
    return batch(message.entry) if message.WhichOneof("part") == "entry" else None


def regraded_part(part: bytes, outcome: bytes, left_out: str) -> bytes:
    """Returns the part with another payload, and with the digest of the one that it had."""
    message = buffer_pb2.BatchPart.FromString(part)
    message.group.parent_sha256 = hashlib.sha256(message.group.outcome).digest()
    message.group.outcome, message.group.left_out = outcome, left_out
    return message.SerializeToString()


def regraded(
    outcome: bytes, scores: Sequence[tuple[float, Mapping[str, float]]], reward_function: str, reward_args_json: str
) -> bytes:
    """Returns a stored group with other rewards, and with what made them. `scores`: (reward, metrics) by experience.

    Only measures of the rollout stay of the old metrics: the others came from the old reward. Raises InvalidInput.
    """
    message = parse_outcome(outcome)
    task = message.group.task
    task.reward_function, task.reward_args_json = reward_function, reward_args_json
    for experience, (reward, metrics) in zip(message.group.experiences, scores, strict=True):
        experience.reward = reward
        for name in [name for name in experience.metrics if name not in _MEASURES and not name.startswith("time/")]:
            del experience.metrics[name]
        experience.metrics.update(metrics)
    return message.SerializeToString()
