"""The one thin layer around nats-py.

Every publish resolves: stored, refused, or timed out after being retried under the same message id. A refusal is
back-pressure. A permission error is an error and not a time-out. Fetches are bounded in messages and in bytes.
"""

from trinity.runtime.broker.connect import configure, connect, credentials
from trinity.runtime.broker.connection import (
    Broker,
    PublishRefused,
    SequenceConflict,
    StoredMessage,
    is_cancelled,
    new_message_id,
)
from trinity.runtime.broker.consume import Gap, Message, PullConsumer, ensure_consumer, on_subject, tail
from trinity.runtime.broker.kv import ABSENT, Bucket, Change, Changes, Entry
from trinity.runtime.broker.streams import StreamSpec, check_stream, ensure_streams
from trinity.runtime.broker.undelivered import return_leases, return_undelivered

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
    "check_stream",
    "configure",
    "connect",
    "credentials",
    "ensure_consumer",
    "ensure_streams",
    "is_cancelled",
    "new_message_id",
    "on_subject",
    "return_leases",
    "return_undelivered",
    "tail",
]
