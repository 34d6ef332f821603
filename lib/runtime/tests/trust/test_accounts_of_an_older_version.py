"""A folder with one account for all roles, as older versions made it, gets the accounts of the roles."""

import time
from pathlib import Path

import pytest

from support.servers.nats import NatsServer
from trinity.runtime.broker import connect
from trinity.runtime.errors import InvalidInput, Unauthenticated
from trinity.runtime.trust import nats_users
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.subjects import Grants

pytestmark = pytest.mark.core


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Made some time ago, with a reader's credentials in the account of the streams."""
    users, then = tmp_path / "identity", time.time() - 100
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: then)
        nats_users.init_accounts(users)
        accounts = [(key, {**body, "exports": []}) for key, body in nats_users._accounts(users, {})[:2]]
        nats_users._write_accounts(users, accounts)
        text = nats_users.issue(users, "reader/reader", Grants(("$JS.API.INFO",), ("_INBOX_reader_x.>",)))
    (users / "users/a-run").mkdir(parents=True)
    (users / "users/a-run/reader-x.creds").write_text(text)
    (tmp_path / "reader.creds").write_text(text)
    return users


def test_it_issues_nothing_before_and_loses_nothing(older: Path) -> None:
    account = nats_users.account_id(older)
    operator = _operator_line(older)
    with pytest.raises(InvalidInput, match="trinity certs rotate"):
        nats_users.issue_user(older, Role.READER, "reader", "a-run")
    nats_users.revoke_users(older, ["UOTHER"])
    assert not nats_users.are_current(older)
    nats_users.init_accounts(older)
    assert nats_users.are_current(older)
    assert nats_users.account_id(older) == account  # and with it the streams
    assert set(nats_users._revoked(older)) == {"UOTHER", "*"}
    assert not (older / "users").exists()
    assert _operator_line(older) == operator  # a running server takes no other
    before = (older / nats_users.ACCOUNTS_FILE).read_bytes()
    nats_users.init_accounts(older)
    assert (older / nats_users.ACCOUNTS_FILE).read_bytes() == before


def _operator_line(users: Path) -> str:
    return next(line for line in (users / nats_users.ACCOUNTS_FILE).read_text().splitlines() if "operator: " in line)


async def test_who_had_a_user_of_the_one_account_is_refused(older: Path, tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", users=older)
    server.start()
    try:
        with pytest.raises(Unauthenticated, match="refuses reader/reader"):
            await connect(server.url, "old", creds=tmp_path / "reader.creds")
        for role in (Role.BUFFER, Role.READER):
            path = nats_users.user_file(older, role, "new", "a-run")
            async with await connect(server.url, "new", creds=path) as broker:
                assert (await broker.js.account_info()).streams == 0
    finally:
        server.kill()
