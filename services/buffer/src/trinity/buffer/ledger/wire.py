"""Ledger entries, parts of batches and the window's cursor, and their protobuf messages."""

import hashlib
from collections import Counter
from dataclasses import dataclass, fields, replace

from google.protobuf.message import DecodeError

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.buffer.window.groups import Dropped, Kept, StoredGroup
from trinity.buffer.window.policy import Policy
from trinity.buffer.window.window import Window
from trinity.runtime.errors import DataLoss
from trinity.runtime.messages import from_message, to_message

_PLAIN = tuple(field.name for field in fields(StoredGroup) if field.name not in ("kept", "reusable_at"))
_COUNTS = tuple(field.name for field in fields(Window) if field.type is int and field.name != "requeued_through")


@dataclass(frozen=True, slots=True)
class CutTask:
    """A task that its step did not wait for. `task_id` is empty if the task is gone from the queue."""

    ordinal: int
    task_id: str


@dataclass(frozen=True, slots=True)
class AuxiliaryRow:
    """An expert row of an auxiliary buffer."""

    buffer: str
    row: int


@dataclass(frozen=True)
class Entry:
    """One optimizer step's batch. Fields as in buffer.v1.LedgerEntry; `cursor` is an encoded LedgerCursor or empty."""

    run: str
    step: int
    policy: str
    created_at_seconds: float
    reward_mean: float = 0.0
    groups: tuple[StoredGroup, ...] = ()
    rows: tuple[int, ...] = ()
    operators: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    auxiliary: tuple[AuxiliaryRow, ...] = ()
    partial: bool = False
    floor_sequence: int = 0
    cursor: bytes = b""
    cursor_sequence: int = 0
    skip_reason: str = ""
    cut: tuple[CutTask, ...] = ()
    previous_sha256: bytes = b""
    sha256: bytes = b""


@dataclass(frozen=True)
class Skip:
    run: str
    step: int
    reason: str
    skipped_at_seconds: float


@dataclass(frozen=True)
class Waiting:
    """A step whose entry is not there yet, and why."""

    step: int
    reason: str
    missing_groups: int = 0
    checkpoint_wanted: bool = False


@dataclass(frozen=True)
class BatchGroup:
    """A group of a batch; `outcome` is encoded as the log holds it."""

    outcome: bytes
    ordinal: int
    traceparent: str = ""
    parent_sha256: bytes = b""
    left_out: str = ""


@dataclass(frozen=True)
class Example:
    """A row of a dataset, in the fields that its kind has."""

    row: int
    buffer: str = ""
    messages_json: str = ""
    rejected_json: str = ""
    text: str = ""
    tools_json: str = ""


@dataclass(frozen=True)
class BatchEnd:
    step: int


Part = Entry | BatchGroup | Example | BatchEnd | Waiting


def group_to_proto(group: StoredGroup) -> pb.LedgerGroup:
    """A step has up to thousands of groups; `to_message` would take five times as long."""
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


def entry_to_proto(entry: Entry) -> pb.LedgerEntry:
    message = to_message(entry, pb.LedgerEntry, groups=list(map(group_to_proto, entry.groups)), cursor=None)
    if entry.cursor:
        message.cursor.MergeFromString(entry.cursor)
    return message


def encode_entry(entry: Entry) -> bytes:
    return entry_to_proto(replace(entry, sha256=b"")).SerializeToString()


def digest_of(entry: Entry) -> bytes:
    """SHA-256 of the content of an entry, as LedgerEntry.sha256 says."""
    content = replace(entry, run="", cursor=b"", cursor_sequence=0, floor_sequence=0, skip_reason="", sha256=b"")
    return hashlib.sha256(entry_to_proto(content).SerializeToString(deterministic=True)).digest()


def decode_entry(data: bytes) -> Entry | None:
    """None if the data holds no entry."""
    try:
        message = pb.LedgerEntry.FromString(data)
    except DecodeError:
        return None
    return entry_from_proto(message)


def entry_from_proto(message: pb.LedgerEntry) -> Entry:
    groups = tuple(map(group_from_proto, message.groups))
    return from_message(Entry, message, groups=groups, cursor=message.cursor.SerializeToString())


def encode_skip(skip: Skip) -> bytes:
    return to_message(skip, pb.SkippedStep).SerializeToString()


def decode_skip(data: bytes) -> Skip | None:
    """None if the data holds no skipped step."""
    try:
        return from_message(Skip, pb.SkippedStep.FromString(data))
    except DecodeError:
        return None


def decode_part(data: bytes) -> Entry | BatchGroup | None:
    """The entry or the group in an encoded part; None for any other part. Raises DecodeError."""
    message = pb.BatchPart.FromString(data)
    match message.WhichOneof("part"):
        case "entry":
            return entry_from_proto(message.entry)
        case "group":
            return from_message(BatchGroup, message.group)
    return None


def part_to_proto(part: Part) -> pb.BatchPart:
    match part:
        case Entry():
            return pb.BatchPart(entry=entry_to_proto(part))
        case BatchGroup():
            return pb.BatchPart(group=to_message(part, pb.BatchGroup))
        case Example():
            return pb.BatchPart(example=to_message(part, pb.Example))
        case BatchEnd():
            return pb.BatchPart(end=pb.BatchEnd(step=part.step))
        case Waiting():
            return pb.BatchPart(waiting=to_message(part, pb.Waiting))


class Pool:
    """The unused groups of a window as a cursor has them. Each is encoded once, not again at every step."""

    def __init__(self) -> None:
        self._encoded: dict[int, bytes] = {}  # by log sequence

    def encode(self, window: Window) -> bytes:
        """A serialised LedgerCursor that holds them and nothing else."""
        before, self._encoded = self._encoded, {}
        for ordinal in sorted(window.unused):
            group = window.unused[ordinal]
            known = before.get(group.log_sequence)
            self._encoded[group.log_sequence] = (
                known or pb.LedgerCursor(pending=[group_to_proto(group)]).SerializeToString()
            )
        return b"".join(self._encoded.values())


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
        fresh_drops=[to_message(dropped, pb.DroppedGroup) for dropped in window.fresh_drops],
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
        fresh_drops=[from_message(Dropped, message) for message in cursor.fresh_drops],
    )
    return window.restore(group_from_proto(group) for group in cursor.pending)
