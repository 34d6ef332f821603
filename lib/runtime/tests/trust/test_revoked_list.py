"""The list of revoked certificates: what it holds, that it is read again, and that a lost file takes nothing back."""

from pathlib import Path

import pytest

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.runtime.trust import revoked
from trinity.runtime.trust.revoked import RevokedList

pytestmark = pytest.mark.core

FIELD = "TRINITY_SYNC_TLS_REVOKED"


def test_numbers_are_added_once_and_read_back() -> None:
    text = revoked.add(revoked.add("", [(1, "gpu-7")]), [(1, "gpu-7"), (2**159, "gpu-8")])
    assert revoked.parse(text) == {1, 2**159}
    assert text.count("gpu-7") == 1
    by_hand = text.rstrip("\n")  # as some editors end a file
    assert revoked.parse(revoked.add(by_hand, [(3, "gpu-9")])) == {1, 2**159, 3}
    assert revoked.parse(f"{'4F:a0':>20}  # as openssl prints it\n\n") == {0x4FA0}


@pytest.mark.parametrize("text", ["gpu-7", "0x12", "1" * 41, "-1", "12 34", "\u0661"])
def test_what_is_no_number_is_named(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^serial: is '"):
        revoked.parse(text)


def test_a_changed_file_counts_at_once_and_a_lost_one_takes_nothing_back(tmp_path: Path) -> None:
    path = tmp_path / revoked.FILE
    found = RevokedList(path, FIELD, must_exist=False)
    assert 1 not in found
    files.write_atomic(path, revoked.add("", [(1, "gpu-7")]).encode())
    assert 1 in found and 2 not in found
    files.write_atomic(path, b"gpu-7\n")
    assert 1 in found, "no list"
    files.write_atomic(path, b"\xff\xfe")
    assert 1 in found, "no text"
    path.unlink()
    assert 1 in found, "lost"
    files.write_atomic(path, revoked.add("", [(2, "gpu-8")]).encode())
    assert 2 in found and 1 not in found


def test_other_rights_are_a_change(tmp_path: Path) -> None:
    """A file may be put there before it may be read."""
    path = tmp_path / "list"
    path.write_text("1")
    before = files.stamp(path)
    path.chmod(0o600 if path.stat().st_mode & 0o077 else 0o644)
    assert files.stamp(path) != before


def test_a_file_that_a_setting_names_must_be_a_list(tmp_path: Path) -> None:
    path = tmp_path / "list"
    with pytest.raises(InvalidInput, match=f"^{FIELD}: {path} cannot be read: No such file"):
        RevokedList(path, FIELD, must_exist=True)
    path.write_text("gpu-7")
    for must_exist in (True, False):
        with pytest.raises(InvalidInput, match=f"^{FIELD}: {path} is no list of serial numbers: serial: is 'gpu-7'"):
            RevokedList(path, FIELD, must_exist=must_exist)
