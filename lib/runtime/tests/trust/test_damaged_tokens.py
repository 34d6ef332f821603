"""A file that holds no token any more is ignored: its owner has no identity, and a server still knows the others."""

from pathlib import Path

import pytest

from trinity.runtime.trust import nats_users
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tokens import KnownTokens, OwnToken, make_tokens

pytestmark = pytest.mark.core


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"a\nb", b"a\x00b", "ä".encode()])
def test_bytes_that_are_no_token_are_none(damage: bytes, tmp_path: Path) -> None:
    make_tokens(tmp_path)
    (tmp_path / "tokens" / Role.READER).write_bytes(damage)
    assert OwnToken(tmp_path, Role.READER).read() == ""
    known = KnownTokens(tmp_path)
    assert known.role_of(OwnToken(tmp_path, Role.TRAINER).read()) is Role.TRAINER
    assert known.role_of(damage.decode(errors="replace")) is None


def test_credentials_that_are_no_text_are_issued_again(tmp_path: Path) -> None:
    nats_users.init_accounts(tmp_path)
    path = nats_users.user_file(tmp_path, Role.OPERATOR, "cli", "a-run")
    path.write_bytes(b"\xff\xfe")
    assert nats_users.user_file(tmp_path, Role.OPERATOR, "cli", "a-run") == path
    assert nats_users.read_user(path).name
