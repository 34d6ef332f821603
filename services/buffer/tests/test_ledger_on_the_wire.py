"""Entries of the ledger come back from their bytes as they were written, and every part of a batch has its message."""

import pytest

from trinity.buffer.ledger.wire import (
    AuxiliaryRow,
    BatchEnd,
    BatchGroup,
    CutTask,
    Entry,
    Example,
    Part,
    Skip,
    Waiting,
    cursor_of,
    decode_entry,
    decode_skip,
    encode_entry,
    encode_skip,
    part_to_proto,
    window_at,
)
from trinity.buffer.window.groups import Dropped, Kept, StoredGroup
from trinity.buffer.window.policy import Policy
from trinity.buffer.window.window import Window
from trinity.runtime.errors import DataLoss

pytestmark = pytest.mark.core

GROUP = StoredGroup(
    7, "t/1", 3, 4, 1, 2, 90, 0.5, 80, True, 1, kept=(Kept(0, 1.0), Kept(2, 0.25, True)), use_count=1,
    reusable_at=2.5, staleness_steps=2,
)  # fmt: skip
WINDOW = Window(Policy(2), log_sequence=9, stored=3, failures={4: 1}, fenced={2})
ENTRY = Entry(
    "run", 5, "fifo", 12.5, 0.25, groups=(GROUP,), rows=(1, 2), operators=("dapo",),
    dropped=(Dropped(2, 6, "stale", 10, "t/0"),), auxiliary=(AuxiliaryRow("sft", 3),), partial=True, floor_sequence=4,
    cursor=cursor_of(WINDOW), cursor_sequence=8, cut=(CutTask(6, "t/5"),),
)  # fmt: skip


def test_an_entry_comes_back_as_it_was_written() -> None:
    assert decode_entry(encode_entry(ENTRY)) == ENTRY
    assert window_at(ENTRY.cursor, Policy(2)) == WINDOW
    assert decode_skip(encode_skip(Skip("run", 5, "odd", 1.5))) == Skip("run", 5, "odd", 1.5)


def test_bytes_that_hold_no_message_are_no_entry() -> None:
    assert decode_entry(b"\xff") is decode_skip(b"\xff") is None
    with pytest.raises(DataLoss, match="cursor"):
        window_at(b"\xff", Policy(2))


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (ENTRY, "entry"),
        (BatchGroup(b"x", 3, "trace"), "group"),
        (Example(1, "sft", "[]"), "example"),
        (BatchEnd(5), "end"),
        (Waiting(5, "no group", 2, True), "waiting"),
    ],
)
def test_every_part_has_its_message(part: Part, name: str) -> None:
    assert part_to_proto(part).WhichOneof("part") == name
