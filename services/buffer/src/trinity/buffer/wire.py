"""Between the buffer's own types and their protobuf messages."""

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.buffer.window import StoredGroup, Window


def group_to_proto(group: StoredGroup, staleness_steps: int = 0, use_count: int = 0) -> pb.LedgerGroup:
    return pb.LedgerGroup(
        log_sequence=group.log_sequence,
        task_id=group.task_id,
        ordinal=group.ordinal,
        num_experiences=group.num_experiences,
        oldest_version=group.oldest_version,
        newest_version=group.newest_version,
        num_response_tokens=group.num_response_tokens,
        reward_mean=group.reward_mean,
        staleness_steps=staleness_steps,
        use_count=use_count,
    )


def group_from_proto(message: pb.LedgerGroup) -> StoredGroup:
    return StoredGroup(
        log_sequence=message.log_sequence,
        task_id=message.task_id,
        ordinal=message.ordinal,
        num_experiences=message.num_experiences,
        oldest_version=message.oldest_version,
        newest_version=message.newest_version,
        num_response_tokens=message.num_response_tokens,
        reward_mean=message.reward_mean,
    )


def cursor_of(window: Window) -> pb.LedgerCursor:
    """The window's whole state, so that a restart reads the log from here."""
    return pb.LedgerCursor(
        log_sequence=window.log_sequence,
        consumed_ordinal=window.consumed_ordinal,
        stored=window.stored,
        dead_letters=window.dead_letters,
        duplicates_dropped=window.duplicates_dropped,
        dead_ordinals=sorted(window.dead),
        pending=[group_to_proto(window.pending[ordinal]) for ordinal in sorted(window.pending)],
        failed_attempts=window.failed_attempts,
        response_tokens=window.response_tokens,
        failures=window.failures,
    )


def window_at(cursor: pb.LedgerCursor, groups_per_step: int) -> Window:
    """Inverse of cursor_of."""
    window = Window(
        groups_per_step=groups_per_step,
        log_sequence=cursor.log_sequence,
        consumed_ordinal=cursor.consumed_ordinal,
        stored=cursor.stored,
        dead_letters=cursor.dead_letters,
        duplicates_dropped=cursor.duplicates_dropped,
        failed_attempts=cursor.failed_attempts,
        response_tokens=cursor.response_tokens,
    )
    pending = (group_from_proto(group) for group in cursor.pending)
    return window.restore(pending, cursor.dead_ordinals, cursor.failures)
