"""Dataclasses and messages of the same fields: there and back, what is replaced, what is missing."""

from dataclasses import dataclass

import pytest

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.runtime.messages import from_message, to_message

pytestmark = pytest.mark.core


@dataclass(frozen=True)
class File:
    name: str
    size_bytes: int


@dataclass(frozen=True)
class Delta:
    base_version: int
    files: tuple[File, ...]


@dataclass(frozen=True)
class Manifest:
    run: str
    version: int
    files: tuple[File, ...] = ()
    delta: Delta | None = None
    note: str = "of no message"


def test_fields_inside_others_come_back() -> None:
    whole = Manifest("r", 3, (File("a", 1), File("b", 2)), Delta(2, (File("d", 1),)))
    message = to_message(whole, pb.Manifest, note=None)
    assert [file.name for file in message.files] == ["a", "b"]
    assert message.delta.files[0].size_bytes == 1
    assert from_message(Manifest, pb.Manifest.FromString(message.SerializeToString())) == whole


def test_what_is_none_stays_unset_and_comes_back_as_none() -> None:
    message = to_message(Manifest("r", 3), pb.Manifest, note=None)
    assert not message.HasField("delta")
    assert from_message(Manifest, message).delta is None


def test_given_fields_replace_those_of_the_value() -> None:
    message = to_message(Manifest("r", 3), pb.Manifest, note=None, version=4, step=7)
    assert (message.version, message.step) == (4, 7)
    assert from_message(Manifest, message, run="other", note="given") == Manifest("other", 4, note="given")


def test_a_field_that_the_message_lacks_is_not_dropped_in_silence() -> None:
    with pytest.raises(ValueError, match="note"):
        to_message(Manifest("r", 3), pb.Manifest)
