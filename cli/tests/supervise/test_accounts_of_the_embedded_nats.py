"""The embedded nats-server: new accounts take over what older ones stored; no secrets in files; taken ports."""

import asyncio
import json
import shutil
import signal
import socket
from pathlib import Path

import pytest

from support.servers.nats import NatsServer
from trinity.cluster.certs import certs
from trinity.config import Config
from trinity.reading import nats, processes
from trinity.reading.children import Child, stop_all
from trinity.reading.errors import RunError
from trinity.reading.job import Job
from trinity.reading.nats import NatsAccess, open_accounts
from trinity.reading.processes import open_nats
from trinity.runtime.broker import StreamSpec, connect, ensure_streams
from trinity.runtime.errors import Unauthenticated
from trinity.runtime.process import free_port
from trinity.runtime.trust import nats_users
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.subjects import Grants

pytestmark = pytest.mark.core


async def test_new_accounts_have_what_the_job_stored(tmp_path: Path) -> None:
    folder, users = tmp_path / "nats", tmp_path / "identity" / "nats"
    first = NatsServer(folder)  # as a run whose NATS let everybody in
    first.start()
    async with await connect(first.url, "test") as broker:
        await ensure_streams(broker, [StreamSpec("S", ("s.>",))])
        await broker.publish("s.a", b"stored", message_id="1")
    first.stop()
    for _ in range(2):
        open_accounts(folder, users)
        open_accounts(folder, users)
        server = NatsServer(folder, users=users)
        server.start()
        old = server.admin()
        async with await connect(server.url, "test", creds=old) as broker:
            assert (await broker.get("S", 1)).data == b"stored"
        server.stop()
        old = old.rename(tmp_path / "old.creds")
        shutil.rmtree(users)
    open_accounts(folder, users)
    server = NatsServer(folder, users=users)
    server.start()
    with pytest.raises(Unauthenticated):
        await connect(server.url, "test", creds=old)
    server.stop()
    shutil.copytree(folder / "store" / "jetstream" / nats_users.account_id(users), folder / "store" / "jetstream" / "B")
    shutil.rmtree(users)
    with pytest.raises(RunError, match="several accounts"):
        open_accounts(folder, users)


async def test_a_job_folder_may_have_quotes_in_its_name(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / 'a "b" \\c $d ü', users=tmp_path / "users")
    server.start()
    try:
        async with await connect(server.url, "test", creds=server.admin()) as broker:
            await ensure_streams(broker, [StreamSpec("S", ("s.>",))])
    finally:
        server.stop()
    assert list((tmp_path / 'a "b" \\c $d ü').glob("store/jetstream/*/streams/S"))


def test_services_get_the_path_of_their_credentials_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRINITY_NATS_CA", raising=False)
    child, access = processes.nats_child(tmp_path / "nats", tmp_path / "identity" / "nats", tmp_path / "log")
    assert access.users is not None
    settings = access.settings(Role.EXPLORER, "a-run", "one")
    path = Path(settings["NATS_CREDS"])
    assert (path.stat().st_mode & 0o777, nats_users.read_user(path).name) == (0o600, "explorer/one")
    above = [path.parent, path.parent.parent, access.users]
    assert {place.stat().st_mode & 0o777 for place in above} == {0o700}
    seeds = [file.read_text() for file in access.users.glob("*.seed")]
    shown = json.dumps([child.command, dict(child.environment), settings]) + (tmp_path / "nats/nats.conf").read_text()
    assert len(seeds) == 3
    assert not [seed for seed in seeds if seed in shown]
    assert NatsAccess("nats://h").settings(Role.SYNC, "a-run") == {"NATS_URL": "nats://h"}
    monkeypatch.setenv("TRINITY_NATS_CA", "/ca.crt")
    assert NatsAccess("nats://h").settings(Role.SYNC, "a-run") == {"NATS_URL": "nats://h", "NATS_CA": "/ca.crt"}
    assert nats.write_config(tmp_path / "open", 1, 2).read_text().count("operator") == 0


async def test_with_a_certificate_it_listens_for_other_machines_and_speaks_tls_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certs.init(tmp_path / "certificates", ["127.0.0.9"])
    monkeypatch.setenv("TRINITY_NATS_IDENTITY", str(tmp_path / "certificates/nats"))
    monkeypatch.delenv("TRINITY_NATS_CA", raising=False)
    monkeypatch.setattr(processes, "HOST", "127.0.0.9")
    child, access = processes.nats_child(tmp_path / "nats", tmp_path / "identity" / "nats", tmp_path / "log")
    child.start()
    try:
        host, _, port = child.address.rpartition(":")
        assert nats.wait_until_open(host, int(port), 20), child.last_error()
        assert access.url == f"nats://127.0.0.9:{port}"
        creds = Path(access.settings(Role.OPERATOR, "a-run")["NATS_CREDS"])
        ca = tmp_path / "certificates/operator/ca.crt"
        async with await connect(access.url, "test", creds=creds, ca=ca) as broker:
            assert broker.js is not None
        with pytest.raises(Unauthenticated, match="has a certificate that this process's authorities did not sign"):
            await connect(access.url, "test", creds=creds, wait_seconds=20)
        certs.init(tmp_path / "others")
        with pytest.raises(Unauthenticated, match="TRINITY_IDENTITY or TRINITY_NATS_CA must be of"):
            await connect(access.url, "test", creds=creds, ca=tmp_path / "others/operator/ca.crt", wait_seconds=20)
    finally:
        child.end_group(signal.SIGKILL)


def test_credentials_are_written_once_while_nothing_in_them_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands of a run ask for the same user, and a client reads its file twice as it connects."""
    nats_users.init_accounts(tmp_path / "a")
    path = nats_users.user_file(tmp_path / "a", Role.OPERATOR, "cli", "a-run")
    first = path.read_bytes()
    assert nats_users.user_file(tmp_path / "a", Role.OPERATOR, "cli", "a-run") == path
    assert path.read_bytes() == first
    for damaged in ("", "no credentials", first.decode().replace("a-run", "b-run")[:-900]):
        path.write_text(damaged)
        nats_users.user_file(tmp_path / "a", Role.OPERATOR, "cli", "a-run")
        assert nats_users.read_user(path).name == "operator/cli"
    monkeypatch.setattr(nats_users, "grants", lambda *_: Grants(("other.>",), ()))
    first = path.read_bytes()
    nats_users.user_file(tmp_path / "a", Role.OPERATOR, "cli", "a-run")
    assert path.read_bytes() != first, "its role has other subjects"
    first = path.read_bytes()
    shutil.rmtree(tmp_path / "a")
    nats_users.init_accounts(tmp_path / "a")
    path.parent.mkdir(parents=True)
    path.write_bytes(first)
    nats_users.user_file(tmp_path / "a", Role.OPERATOR, "cli", "a-run")
    assert path.read_bytes() != first, "its account is another"


@pytest.mark.parametrize("taken", ["the port of clients", "the port of metrics"])
async def test_a_port_that_is_taken_before_it_listens_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    job = Job(Config(project="p", name="n", checkpoint_root_dir=str(tmp_path)))
    monkeypatch.delenv("TRINITY_NATS_URL", raising=False)
    started: list[Child] = []
    with socket.create_server(("127.0.0.1", 0)) as holder:
        held = holder.getsockname()[1]
        ports = iter([held, free_port()] if taken == "the port of clients" else [free_port(), held])
        monkeypatch.setattr(processes, "free_port", lambda host="127.0.0.1": next(ports, 0) or free_port(host))
        try:
            access = await open_nats(job, started, asyncio.Event())
            (child,) = started
            assert child.is_running() and str(held) not in (child.address, child.metrics, access.url)
        finally:
            await stop_all(started, 2)
    assert "address already in use" in child.output.read_text()


def test_what_a_store_holds_already_counts_to_its_part_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats, "free_gib", lambda folder: 10.0)
    (tmp_path / "store/jetstream").mkdir(parents=True)
    (tmp_path / "store/jetstream/1.blk").open("wb").truncate(40 * 2**30)  # takes no room
    assert "max_file_store: 40GB" in nats.write_config(tmp_path, 1, 2).read_text()
