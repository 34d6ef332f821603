"""Between the buffer's own types and their protobuf messages."""

from collections import Counter
from dataclasses import asdict, fields

from google.protobuf.message import DecodeError

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.buffer.window.groups import Dropped, Kept, StoredGroup
from trinity.buffer.window.policy import Policy
from trinity.buffer.window.window import Window
from trinity.runtime.errors import DataLoss

_PLAIN = tuple(field.name for field in fields(StoredGroup) if field.name not in ("kept", "reusable_at"))
_COUNTS = tuple(field.name for field in fields(Window) if field.type is int and field.name != "requeued_through")


def group_to_proto(group: StoredGroup) -> pb.LedgerGroup:
    message = pb.LedgerGroup(**{name: getattr(group, name) for name in _PLAIN}, reusable_at_seconds=group.reusable_at)
    for kept in group.kept:
        message.experiences.add(index=kept.index, reward=kept.reward, masked=kept.masked)
    return message


def group_from_proto(message: pb.LedgerGroup) -> StoredGroup:
    return StoredGroup(
        **{name: getattr(message, name) for name in _PLAIN},
        kept=tuple(Kept(kept.index, kept.reward, kept.masked) for kept in message.experiences),
        reusable_at=message.reusable_at_seconds,
    )


def dropped_to_proto(group: Dropped) -> pb.DroppedGroup:
    return pb.DroppedGroup(**asdict(group))


def dropped_from_proto(message: pb.DroppedGroup) -> Dropped:
    return Dropped(**{field.name: getattr(message, field.name) for field in fields(Dropped)})


class Pool:
    """The unused groups of a window as a cursor has them. Each is encoded once, not again at every step."""

    def __init__(self) -> None:
        self._encoded: dict[int, bytes] = {}  # by log sequence

    def encode(self, window: Window) -> bytes:
        """A serialised LedgerCursor that holds them and nothing else."""
        before, self._encoded = self._encoded, {}
        for ordinal in sorted(window.unused):
            group = window.unused[ordinal]
            self._encoded[group.log_sequence] = before.get(group.log_sequence) or _pending(group)
        return b"".join(self._encoded.values())


def _pending(group: StoredGroup) -> bytes:
    return pb.LedgerCursor(pending=[group_to_proto(group)]).SerializeToString()


def cursor_of(window: Window, pool: Pool | None = None) -> bytes:
    """The window's whole state as an encoded LedgerCursor, from which a restart reads the log. `pool`: the window's."""
    cursor = pb.LedgerCursor(
        **{name: getattr(window, name) for name in _COUNTS},
        ended=sorted(window.ended),
        reusable=[group_to_proto(window.reusable[ordinal]) for ordinal in sorted(window.reusable)],
        failures=window.failures,
        requeued=window.requeued,
        dropped=window.dropped,
        fenced=sorted(window.fenced),
        dead=sorted(window.dead),
        cut=sorted(window.cut),
        fresh_drops=[dropped_to_proto(dropped) for dropped in window.fresh_drops],
    )
    return cursor.SerializeToString(deterministic=True) + (pool or Pool()).encode(window)


def window_at(data: bytes, policy: Policy) -> Window:
    """Inverse of cursor_of. Raises DataLoss for data that holds no cursor."""
    try:
        cursor = pb.LedgerCursor.FromString(data)
    except DecodeError:
        raise DataLoss("the cursor of the newest ledger entry cannot be read") from None
    window = Window(
        policy,
        **{name: getattr(cursor, name) for name in _COUNTS},
        ended=set(cursor.ended),
        reusable={message.ordinal: group_from_proto(message) for message in cursor.reusable},
        failures=dict(cursor.failures),
        requeued=dict(cursor.requeued),
        dropped=Counter(dict(cursor.dropped)),
        fenced=set(cursor.fenced),
        dead=set(cursor.dead),
        cut=set(cursor.cut),
        unqueued=set(cursor.cut),
        fresh_drops=[dropped_from_proto(message) for message in cursor.fresh_drops],
    )
    return window.restore(group_from_proto(group) for group in cursor.pending)
