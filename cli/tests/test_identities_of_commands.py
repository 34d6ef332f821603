"""Commands show the identity of the job that they are about, and say in one sentence when it is not accepted."""

import asyncio
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest

from support.servers.certificates import make_certificates, tls_settings
from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from trinity.config import Config
from trinity.config.run_record import Addresses
from trinity.reading import job, processes
from trinity.reading.client import Buffer, Watcher
from trinity.reading.errors import RunError
from trinity.reading.nats import NatsAccess
from trinity.runtime import rpc
from trinity.runtime.errors import InvalidInput
from trinity.runtime.process import environment
from trinity.runtime.trust import identity
from trinity.runtime.trust.gate import Gate
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tokens import KnownTokens, make_tokens

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The identity of this process is as before after each test."""
    monkeypatch.delenv("TRINITY_IDENTITY_FOLDER", raising=False)
    before = identity.own()
    yield
    identity.configure(before)


class LittleBuffer(buffer_pb2_grpc.BufferServiceServicer):
    async def Stats(self, request: buffer_pb2.StatsRequest, context: object) -> buffer_pb2.StatsResponse:
        return buffer_pb2.StatsResponse(fed=7)

    async def ListDeadLetters(self, request: object, context: object) -> buffer_pb2.ListDeadLettersResponse:
        return buffer_pb2.ListDeadLettersResponse()


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """A buffer that demands the identities of the job in `tmp_path`."""
    make_tokens(tmp_path / "identity")
    server = grpc.aio.server(interceptors=[rpc.Edge(Gate(KnownTokens(tmp_path / "identity")))])
    buffer_pb2_grpc.add_BufferServiceServicer_to_server(LittleBuffer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(grace=0)


async def watched(address: str) -> int:
    watcher = Watcher("run", Addresses(buffer=address))
    try:
        view = await watcher.refresh()
        watcher.raise_if_refused()
    finally:
        await watcher.close()
    assert view.buffer is not None
    return view.buffer.fed


async def test_a_command_has_the_operators_role_in_its_job(address: str, tmp_path: Path) -> None:
    job.identify(tmp_path)
    assert await watched(address) == 7
    async with rpc.channel(address) as channel:
        assert await Buffer(channel, "run").letters(1) == []


def test_the_folder_of_a_new_job_is_for_its_user_alone(tmp_path: Path) -> None:
    """Samples, weights and logs lie in it. A folder that is there keeps the mode that its user gave it."""
    config = Config(project="p", name="n", checkpoint_root_dir=str(tmp_path / "root"))
    made = job.Job(config)
    made.lock()
    job.identify(tmp_path / "other/n", starts_services=True)
    (given := tmp_path / "given").mkdir(mode=0o750)
    job.identify(given, starts_services=True)
    modes = [stat.S_IMODE(folder.stat().st_mode) for folder in (made.folder, tmp_path / "other/n", given)]
    assert modes == [0o700, 0o700, 0o750]


async def test_another_jobs_identity_is_refused_in_one_sentence(address: str, tmp_path: Path) -> None:
    job.identify(tmp_path / "another", starts_services=True)
    with pytest.raises(RunError, match=r"does not accept this command: .*token is none of this run's; start it as"):
        await watched(address)


async def test_a_job_without_identities_shows_none(address: str, tmp_path: Path) -> None:
    job.identify(tmp_path / "nothing")
    assert identity.own() is None
    async with rpc.channel(address) as channel:
        with pytest.raises(RunError, match=r"does not accept this command: .*shows no identity"):
            await Buffer(channel, "run").letters(1)


async def test_a_wrong_role_is_refused_with_role_and_method(address: str, tmp_path: Path) -> None:
    job.identify(tmp_path, Role.READER)
    async with rpc.channel(address) as channel:
        with pytest.raises(RunError, match=r"role reader may not call .*DropDeadLetters; operator may"):
            await Buffer(channel, "run").drop_letters([1])


async def test_a_folder_of_identities_may_be_named(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_IDENTITY_FOLDER", str(tmp_path / "identity"))
    job.identify(tmp_path / "elsewhere", starts_services=True)
    assert await watched(address) == 7
    assert not (tmp_path / "elsewhere").exists()
    monkeypatch.setenv("TRINITY_IDENTITY_FOLDER", str(tmp_path / "missing"))
    with pytest.raises(RunError, match=r"TRINITY_IDENTITY_FOLDER: .*missing has no tokens"):
        job.identify(tmp_path)


async def test_an_address_of_others_learns_no_token(tmp_path: Path) -> None:
    shown: list[dict[str, str]] = []

    class Listening(LittleBuffer):
        async def Stats(self, request: object, context: grpc.aio.ServicerContext) -> buffer_pb2.StatsResponse:
            shown.append({key: str(value) for key, value in context.invocation_metadata() or ()})
            return buffer_pb2.StatsResponse()

    server = grpc.aio.server()
    buffer_pb2_grpc.add_BufferServiceServicer_to_server(Listening(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    job.identify(tmp_path, starts_services=True)
    own = identity.own()
    assert own is not None
    for given in ("own", None, replace(own, role=Role.TRAINER)):
        async with rpc.channel(address, identity=given) as channel:
            await buffer_pb2_grpc.BufferServiceStub(channel).Stats(buffer_pb2.StatsRequest(), timeout=20)
    with rpc.blocking_channel(address) as blocking:
        stub = buffer_pb2_grpc.BufferServiceStub(blocking)
        await asyncio.to_thread(stub.Stats, buffer_pb2.StatsRequest(), timeout=20)
    await server.stop(grace=0)
    tokens = [f"Bearer {(tmp_path / 'identity/tokens' / role).read_text()}" for role in ("operator", "trainer")]
    assert [one.get("authorization") for one in shown] == [tokens[0], None, tokens[1], tokens[0]]


@pytest.mark.parametrize(
    "address", ["10.0.0.1:7001", "evil:1", "127.0.0.1.evil:1", "ipv4:10.0.0.1:1,127.0.0.1:2", "dns:///127.0.0.1:1"]
)
def test_a_token_is_not_sent_unencrypted_to_other_machines(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.identify(tmp_path, starts_services=True)
    for open_channel in (rpc.channel, rpc.blocking_channel):
        with pytest.raises(InvalidInput, match=r"would be sent unencrypted; use certificates .* TRINITY_INSECURE"):
            open_channel(address)
    with pytest.raises(InvalidInput, match=r"address of sync: is .* unencrypted"):
        processes.service_child("sync", tmp_path, {}, address=address)
    monkeypatch.setenv("TRINITY_INSECURE", "1")
    job.identify(tmp_path)
    rpc.blocking_channel(address).close()
    assert processes.service_child("sync", tmp_path, {}, address=address).environment["TRINITY_SYNC_INSECURE"] == "1"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "[::1]"])
def test_a_token_is_sent_on_the_loopback(host: str, tmp_path: Path) -> None:
    job.identify(tmp_path, starts_services=True)
    rpc.blocking_channel(f"{host}:7001").close()
    assert "TRINITY_SYNC_INSECURE" not in processes.service_child("sync", tmp_path, {}).environment


def test_children_get_the_folder_and_no_token(tmp_path: Path) -> None:
    job.identify(tmp_path, starts_services=True)
    child = processes.reader_child(tmp_path / "config.json", NatsAccess("nats://127.0.0.1:1"), "run", tmp_path / "log")
    assert child.environment["TRINITY_BUFFER_IDENTITY_FOLDER"] == str(tmp_path / "identity")
    given = "\0".join([*child.environment.values(), *child.command])
    assert not [role for role in Role if (tmp_path / "identity/tokens" / role).read_text() in given]


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    """The variables that give this process the certificate of an operator."""
    folder = make_certificates(tmp_path / "certificates")
    return {f"TRINITY_{name}": value for name, value in tls_settings(folder, "operator").items()}


def test_a_certificate_of_the_environment_is_the_identity(tmp_path: Path, certificates: dict[str, str]) -> None:
    make_tokens(tmp_path / "identity")  # of an earlier run without certificates
    with environment(certificates):
        job.identify(tmp_path)
        own = identity.own()
        assert own is not None and own.tls is not None
        assert (own.role, own.folder, own.metadata()) == (Role.OPERATOR, None, [])
        with (
            environment({"TRINITY_IDENTITY_FOLDER": str(tmp_path / "identity")}),
            pytest.raises(RunError, match="one kind"),
        ):
            job.identify(tmp_path)


def test_a_run_has_certificates_for_all_or_none(tmp_path: Path, certificates: dict[str, str]) -> None:
    with environment(certificates):
        job.identify(tmp_path, starts_services=True)
        assert not (tmp_path / "identity").exists(), "no tokens beside certificates"
        with pytest.raises(RunError, match=r"^TRINITY_SYNC_TLS_CERT is not set, but TRINITY_TLS_CERT is: name "):
            processes.service_child("sync", tmp_path, {})
        with environment({"TRINITY_SYNC_TLS_CERT": "tls.crt"}):
            assert "TRINITY_SYNC_IDENTITY_FOLDER" not in processes.service_child("sync", tmp_path, {}).environment
    with (
        environment({"TRINITY_SYNC_TLS_CERT": "tls.crt"}),
        pytest.raises(RunError, match="but TRINITY_TLS_CERT is not"),
    ):
        job.identify(tmp_path, starts_services=True)
