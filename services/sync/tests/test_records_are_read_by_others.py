"""What the buffer reads of a version's record is what the sync service wrote."""

import pytest

from trinity.sync.store.records import Failure, Measured, Record, decode, encode
from trinity.weights.pointer import verdict_of
from trinity.weights.wire import VersionState

pytestmark = pytest.mark.core


@pytest.mark.parametrize("state", [VersionState.STAGED, VersionState.VERIFIED, VersionState.REJECTED])
def test_a_verdict_is_read_as_it_was_written(state: VersionState) -> None:
    record = Record(
        3, 3, "digest", state, measured=Measured(3, 0.1, 0.2, -1.0, -1.2, "a"), failures=(Failure("a", 1, "damaged"),)
    )
    assert verdict_of(encode(record)) is state
    assert decode(Record, encode(record)) == record


def test_a_version_without_a_record_has_no_verdict() -> None:
    assert verdict_of(b"") is None
