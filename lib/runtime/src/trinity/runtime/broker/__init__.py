"""The one thin layer around nats-py.

Every publish resolves: stored, refused, or timed out after being retried under the same message id. A refusal is
back-pressure. A permission error is an error and not a time-out. Fetches are bounded in messages and in bytes.
"""

from trinity.runtime.broker.connection import (
    Broker,
    PublishRefused,
    SequenceConflict,
    StoredMessage,
    connect,
    is_cancelled,
)
from trinity.runtime.broker.consume import Gap, Message, PullConsumer, tail
from trinity.runtime.broker.kv import ABSENT, Bucket, Change, Changes, Entry
from trinity.runtime.broker.streams import StreamSpec, ensure_streams

__all__ = [
    "ABSENT",
    "Broker",
    "Bucket",
    "Change",
    "Changes",
    "Entry",
    "Gap",
    "Message",
    "PublishRefused",
    "PullConsumer",
    "SequenceConflict",
    "StoredMessage",
    "StreamSpec",
    "connect",
    "ensure_streams",
    "is_cancelled",
    "tail",
]
